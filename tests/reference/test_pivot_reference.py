"""StructKV's metrics and pivots in the reference, against loops and by hand."""

import math
import random
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from . import structkv
from .conftest import LAYERS, prompt_of
from .structkv import METRICS, WEIGHTS


@pytest.mark.parametrize("window", [1, 8])
def test_metrics_against_loops(model: PreTrainedModel, window: int) -> None:
    """Lengths where top tenths round, where there is one key, and where the window is short."""
    prompts = [prompt_of(n, seed=n) for n in (39, 25, 5, 1)]
    expected = torch.zeros(3, LAYERS, dtype=torch.float64)
    for prompt in prompts:
        with torch.no_grad():
            attentions = model(torch.tensor([prompt]), output_attentions=True).attentions
        n = len(prompt)
        for index, table in enumerate(attentions):
            heads, rows = table[0].double().tolist(), range(max(0, n - window), n)
            total = [0.0, 0.0, 0.0]
            for head in heads:
                for i in rows:
                    seen = head[i][: i + 1]
                    assert not any(head[i][i + 1 :]) and sum(seen) == pytest.approx(1)
                    mean = sum(seen) / len(seen)
                    total[0] += -sum(a * math.log(a) for a in seen if a > 0)
                    total[1] += sum(sorted(seen, reverse=True)[: max(1, int(0.1 * n))])
                    total[2] += sum((a - mean) ** 2 for a in seen) / len(seen)
            share = len(heads) * len(rows) * len(prompts)
            expected[:, index] += torch.tensor(total, dtype=torch.float64) / share
    actual = structkv.metrics(model, prompts, window)
    assert tuple(actual) == METRICS
    for name, values in zip(METRICS, expected, strict=True):
        torch.testing.assert_close(actual[name], values, rtol=1e-5, atol=1e-6)
        # A wrong layer must show.
        assert values.diff().abs().min() > 1e-4
    assert 1 <= structkv.pivot_of(actual) < LAYERS


def test_measures_by_hand() -> None:
    probs = torch.zeros(1, 12, 12)
    probs[0, 10, :4] = 0.25
    probs[0, 11, 3] = 1
    entropy, sparsity, variance = structkv.measure(probs, window=2)
    assert entropy == pytest.approx(math.log(4) / 2)
    assert sparsity == pytest.approx((0.25 + 1) / 2)
    # 11 and 12 visible keys, and not 12 twice.
    spread = [4 / 16 / 11 - 1 / 11**2, 1 / 12 - 1 / 12**2]
    assert variance == pytest.approx(sum(spread) / 2)
    alone = structkv.measure(torch.ones(3, 1, 1), window=8)
    assert torch.stack(alone).tolist() == [0, 1, 0]
    twenty = torch.zeros(1, 20, 20)
    twenty[0, 19, :4] = torch.tensor([0.4, 0.1, 0.2, 0.3])
    assert structkv.measure(twenty, window=1)[1] == pytest.approx(0.7)  # two of twenty keys


def measured(
    entropy: list[float], sparsity: list[float], variance: list[float]
) -> dict[str, torch.Tensor]:
    values = (entropy, sparsity, variance)
    return {
        name: torch.tensor(v, dtype=torch.float64) for name, v in zip(METRICS, values, strict=True)
    }


def test_transition_scores_by_hand() -> None:
    values = measured([5, 4, 1, 1, 2], [0.1, 0.2, 0.6, 0.6, 0.6], [0, 0, 0, 4, 5])
    # Differences: entropy -1 -3 0 1, sparsity .1 .4 0 0, variance 0 0 4 1.
    scores = structkv.transition_scores(values, WEIGHTS)
    assert math.isnan(scores[0])
    expected = [
        0.2 * 2 / 4 + 0.3 * 1 / 4 + 0,
        0.2 * 1 + 0.3 * 1 + 0,
        0.2 * 1 / 4 + 0 + 0.5 * 1,
        0 + 0 + 0.5 * 1 / 4,
    ]
    assert scores[1:].tolist() == pytest.approx(expected)
    assert structkv.pivot_of(values, WEIGHTS) == 4  # 0.55 at layer 3
    assert structkv.pivot_of(values, (0.2, 0.3, 0.4)) == 3  # 0.45 there, 0.5 at layer 2
    assert structkv.pivot_of(values, (0.0, 0.0, 1.0)) == 4


def test_pivots_at_the_edges() -> None:
    flat, rising = [2.0] * 5, [0.0, 1.0, 2.0, 3.0, 4.0]
    # Differences without a range say nothing, and the lowest layer wins.
    for values in (measured(flat, flat, flat), measured(rising, flat, rising)):
        assert structkv.transition_scores(values)[1:].tolist() == [0] * 4
        assert structkv.pivot_of(values) == 2
    # Only what has a range counts.
    step = [0.0, 0.0, 0.0, 1.0, 1.0]
    assert structkv.transition_scores(measured(flat, rising, step))[1:].tolist() == [0, 0, 0.5, 0]
    # Ties between layers go to the lowest.
    twice = [0.0, 0.0, 1.0, 1.0, 2.0]
    assert structkv.pivot_of(measured(flat, flat, twice)) == 3
    # The last layer's transition cannot be one layer further up.
    last = [0.0, 0.0, 0.0, 0.0, 1.0]
    assert structkv.pivot_of(measured(flat, last, flat)) == 4
    # Entropy is to fall.
    assert structkv.pivot_of(measured(twice, flat, flat)) == 2
    assert structkv.pivot_of(measured([0.0, 0.0, -1.0, -1.0, -2.0], flat, flat)) == 3
    # Models of one layer and of two.
    assert structkv.pivot_of(measured([1.0], [1.0], [1.0])) == 0
    assert structkv.pivot_of(measured([1.0, 2.0], [1.0, 2.0], [1.0, 2.0])) == 1


def test_online_by_hand() -> None:
    flat = [0.0] * 8
    # Variance grows by 1, 3, 2, 1, 5, 0, 0.
    values = measured(flat, flat, [0.0, 1.0, 4.0, 6.0, 7.0, 12.0, 12.0, 12.0])
    for (low, high), pivot in {
        (0, 7): 3,  # at layer 2 the largest is its own; at 3 it lies behind
        (1, 7): 3,
        (3, 7): 3,
        (4, 7): 4,
        (5, 7): 6,  # at layer 5 the largest is its own again
        (7, 7): 7,
        (0, 3): 3,
        (0, 2): 2,  # the limit
        (0, 0): 0,
        (5, 5): 5,
    }.items():
        assert structkv.online_pivot(values, WEIGHTS, low, high) == pivot, (low, high)
    # It takes two differences to compare, and where they are equal the lower is the largest.
    assert structkv.online_pivot(measured(flat, flat, flat), WEIGHTS, 0, 7) == 2
    # What grows ever faster is always ahead of it.
    faster = [float(k * k) for k in range(8)]
    assert structkv.online_pivot(measured(flat, flat, faster), WEIGHTS, 1, 6) == 6
    for low, high in ((-1, 3), (4, 3), (3, 8)):
        with pytest.raises(ValueError, match="8 layers"):
            structkv.online_pivot(values, WEIGHTS, low, high)


def test_online_against_its_definition() -> None:
    draw = random.Random(0)
    fired = set()
    for _ in range(200):
        # Small integers, for ties and for metrics without a range.
        values = [[float(draw.randint(0, 3)) for _ in range(7)] for _ in METRICS]
        weights = tuple(draw.choice((0.0, 0.25, 0.5)) for _ in METRICS)
        low = draw.randint(0, 6)
        high = draw.randint(low, 6)
        pivot = high
        for layer in reversed(range(max(low, 2), high)):
            total = [0.0] * layer
            for series, sign, weight in zip(values, (-1, 1, 1), weights, strict=True):
                steps = [sign * (b - a) for a, b in pairwise(series[: layer + 1])]
                least, span = min(steps), max(steps) - min(steps)
                for k, step in enumerate(steps):
                    total[k] += weight * ((step - least) / span) if span else 0
            if total.index(max(total)) + 1 <= layer - 1:
                pivot = layer
        assert structkv.online_pivot(measured(*values), weights, low, high) == pivot
        fired.add((pivot, pivot == high))
        # Without a limit in the way it never looks ahead.
        cut = measured(*(series[: pivot + 1] for series in values))
        assert structkv.online_pivot(cut, weights, min(low, pivot), pivot) == pivot
    assert len(fired) > 8
