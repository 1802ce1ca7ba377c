"""StructKV's pivot: metrics and scores against explicit loops, and the online rule."""

import math
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from vllm_kvx.equations.pivot import (
    Metrics,
    attention_metrics,
    by_layer,
    mean_metrics,
    online_pivot,
    pivot_within,
    transition_is_behind,
    transition_scores,
)
from vllm_kvx.policy.axes import Weights
from vllm_kvx.policy.methods.structkv import online_limits, paper_limits

WEIGHTS = (0.2, 0.3, 0.5)
FLAT = [0.0] * 5


def attention_of(heads: int, window: int, keys: int, seed: int = 0) -> Tensor:
    """Softmax rows (H, w, n) as the end of a prompt has them, and some exact zeros."""
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(heads, window, keys, generator=generator)
    hidden = torch.arange(keys) > torch.arange(keys - window, keys)[:, None]
    scores[:, :, 0] = -1e4
    if window == keys:
        scores[:, 0, 0] = 0
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)


def metrics_of(entropy: list[float], sparsity: list[float], variance: list[float]) -> Metrics:
    return Metrics(*(torch.tensor(v, dtype=torch.float64) for v in (entropy, sparsity, variance)))


def scores_by_loop(metrics: Metrics, weights: Weights) -> list[float]:
    """Eq. 7 and 8, of layers 1 and up."""
    layers = len(metrics.entropy)
    total = [0.0] * (layers - 1)
    for series, sign, weight in zip(metrics, (-1, 1, 1), weights, strict=True):
        steps = [sign * (series[k].item() - series[k - 1].item()) for k in range(1, layers)]
        for k, step in enumerate(steps):
            if max(steps) > min(steps):
                total[k] += weight * (step - min(steps)) / (max(steps) - min(steps))
    return total


def best_layer(scores: list[float]) -> int:
    """The lowest of the best, of the scores of layers 1 and up."""
    best = 1
    for layer in range(1, len(scores) + 1):
        if scores[layer - 1] > scores[best - 1]:
            best = layer
    return best


def pivot_of(scores: Tensor) -> int:
    """Eq. 9 over all layers: the one above the best, or the last."""
    return min(best_layer(scores[1:].tolist()) + 1, len(scores) - 1)


@pytest.mark.parametrize(
    ("heads", "window", "keys"), [(1, 1, 1), (2, 3, 3), (1, 2, 9), (3, 4, 10), (4, 8, 57)]
)
def test_metrics_by_loops(heads: int, window: int, keys: int) -> None:
    attention = attention_of(heads, window, keys, seed=keys)
    entropy = sparsity = variance = 0.0
    for head in attention.double().tolist():
        for row_index, row in enumerate(head):
            visible = row[: keys - window + row_index + 1]
            assert sum(row) == pytest.approx(sum(visible)) == pytest.approx(1)
            entropy -= sum(a * math.log(a) for a in row if a > 0)
            sparsity += sum(sorted(row, reverse=True)[: max(1, int(0.1 * keys))])
            mean = sum(visible) / len(visible)
            variance += sum((a - mean) ** 2 for a in visible) / len(visible)
    actual = attention_metrics(attention)
    expected = [value / (heads * window) for value in (entropy, sparsity, variance)]
    assert [value.item() for value in actual] == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert all(value.dtype == torch.float64 and value.shape == () for value in actual)


def test_metrics_of_known_rows(device: str) -> None:
    uniform = torch.full((2, 1, 40), 1 / 40, device=device)
    entropy, sparsity, variance = attention_metrics(uniform)
    assert entropy.item() == pytest.approx(math.log(40), rel=1e-6)
    assert sparsity.item() == pytest.approx(4 / 40, rel=1e-6)
    # No rounding of a difference of squares.
    assert 0 <= variance.item() < 1e-18
    single = torch.zeros(2, 1, 40, device=device)
    single[:, :, 7] = 1
    entropy, sparsity, variance = attention_metrics(single)
    assert (entropy.item(), sparsity.item()) == (0, 1)
    assert variance.item() == pytest.approx(1 / 40 - 1 / 1600)
    # Keys that a row may not see are not part of its variance, but of n in the sparsity.
    early = torch.zeros(1, 2, 20, device=device)
    early[0, 0, :19], early[0, 1, :4] = 1 / 19, 0.25
    _, sparsity, variance = attention_metrics(early)
    assert sparsity.item() == pytest.approx((2 / 19 + 0.5) / 2)
    assert variance.item() == pytest.approx((4 * 0.2**2 + 16 * 0.05**2) / 20 / 2, abs=1e-12)


def test_layers_are_stacked_and_prompts_averaged() -> None:
    layers = [attention_metrics(attention_of(2, 3, 12, seed)) for seed in range(4)]
    model = by_layer(layers)
    assert all(metric.shape == (4,) for metric in model)
    assert model.variance[2] == layers[2].variance
    other = Metrics(*(3 * metric for metric in model))
    for mean, metric in zip(mean_metrics([model, other]), model, strict=True):
        torch.testing.assert_close(mean, 2 * metric)


def test_the_mean_comes_before_the_difference() -> None:
    """Else each prompt's own range would count alike."""
    small = metrics_of(FLAT, FLAT, [0.0, 0.0, 1.0, 1.0, 1.0])
    large = metrics_of(FLAT, FLAT, [0.0, 0.0, 0.0, 9.0, 9.0])
    scores = transition_scores(*mean_metrics([small, large]), WEIGHTS)
    assert scores[1:].tolist() == pytest.approx([0, 0.5 / 9, 0.5, 0])


@pytest.mark.parametrize("layers", [2, 3, 8, 28, 64])
def test_scores_by_loops(layers: int) -> None:
    generator = torch.Generator().manual_seed(layers)
    for weights in (WEIGHTS, (1.0, 0.0, 0.0), (0.0, 0.0, 0.25)):
        metrics = Metrics(*torch.randn(3, layers, generator=generator, dtype=torch.float64))
        scores = transition_scores(*metrics, weights)
        expected = scores_by_loop(metrics, weights)
        assert scores.shape == (layers,) and scores[0].isnan()
        assert scores[1:].tolist() == pytest.approx(expected, rel=1e-12)
        assert pivot_of(scores) == min(best_layer(expected) + 1, layers - 1)


def test_scores_by_hand() -> None:
    metrics = metrics_of([5, 4, 1, 1, 2], [0.1, 0.2, 0.6, 0.6, 0.6], [0, 0, 0, 4, 5])
    # Differences: entropy -1 -3 0 1, sparsity .1 .4 0 0, variance 0 0 4 1.
    scores = transition_scores(*metrics, WEIGHTS)
    assert scores[1:].tolist() == pytest.approx([0.175, 0.5, 0.55, 0.125])
    assert pivot_of(scores) == 4
    assert pivot_of(transition_scores(*metrics, (0.2, 0.3, 0.4))) == 3


def test_a_metric_without_a_range_counts_nothing() -> None:
    rising = [0.0, 1.0, 2.0, 3.0, 4.0]
    for metrics in (metrics_of(FLAT, FLAT, FLAT), metrics_of(rising, FLAT, rising)):
        scores = transition_scores(*metrics, WEIGHTS)
        assert scores[1:].tolist() == [0, 0, 0, 0] and pivot_of(scores) == 2
    step = [0.0, 0.0, 0.0, 1.0, 1.0]
    scores = transition_scores(*metrics_of(FLAT, rising, step), WEIGHTS)
    assert scores[1:].tolist() == [0, 0, 0.5, 0] and pivot_of(scores) == 4


def test_ties_and_edges() -> None:
    twice = [0.0, 0.0, 1.0, 1.0, 2.0]
    assert pivot_of(transition_scores(*metrics_of(FLAT, FLAT, twice), WEIGHTS)) == 3
    # A transition into the last layer: there is none above it.
    last = [0.0, 0.0, 0.0, 0.0, 1.0]
    assert pivot_of(transition_scores(*metrics_of(FLAT, last, FLAT), WEIGHTS)) == 4
    # Entropy is to fall, the others to rise.
    fall = [-value for value in last]
    assert pivot_of(transition_scores(*metrics_of(fall, FLAT, FLAT), WEIGHTS)) == 4
    assert pivot_of(transition_scores(*metrics_of(last, FLAT, FLAT), WEIGHTS)) == 2
    for layers, pivot in ((1, 0), (2, 1)):
        scores = transition_scores(
            *metrics_of([1.0] * layers, [1.0] * layers, FLAT[:layers]), WEIGHTS
        )
        assert len(scores) == layers and pivot_of(scores) == pivot


def test_online_by_hand() -> None:
    flat = [0.0] * 8
    # Variance grows by 1, 3, 2, 1, 5, 0, 0.
    metrics = metrics_of(flat, flat, [0.0, 1.0, 4.0, 6.0, 7.0, 12.0, 12.0, 12.0])
    for (low, high), pivot in {
        (0, 7): 3,  # at layer 2 the largest is its own; at 3 it lies behind
        (3, 7): 3,
        (4, 7): 4,
        (5, 7): 6,  # at layer 5 the largest is its own again
        (7, 7): 7,
        (0, 3): 3,
        (0, 2): 2,  # the limit
        (0, 0): 0,
    }.items():
        assert online_pivot(*metrics, WEIGHTS, low, high) == pivot, (low, high)
    # Of equal ones the lowest is the largest, so it lies behind as soon as there are two.
    assert online_pivot(*metrics_of(flat, flat, flat), WEIGHTS, 0, 7) == 2
    # What grows ever faster is never behind.
    faster = [float(k * k) for k in range(8)]
    assert online_pivot(*metrics_of(flat, flat, faster), WEIGHTS, 1, 6) == 6
    for low, high in ((-1, 3), (4, 3), (3, 8)):
        with pytest.raises(ValueError, match=r"not layers of 0 \.\. 7"):
            online_pivot(*metrics, WEIGHTS, low, high)


def test_online_is_its_definition_and_looks_at_nothing_later() -> None:
    draw = random.Random(0)
    fired = set()
    for _ in range(200):
        # Small integers, for ties and for metrics without a range.
        metrics = metrics_of(*([float(draw.randint(0, 3)) for _ in range(7)] for _ in range(3)))
        weights = tuple(draw.choice((0.0, 0.25, 0.5)) for _ in range(3))
        low = draw.randint(0, 6)
        high = draw.randint(low, 6)
        expected = high
        for layer in range(low, high):
            seen = Metrics(*(metric[: layer + 1] for metric in metrics))
            behind = layer >= 2 and best_layer(scores_by_loop(seen, weights)) <= layer - 1
            assert transition_is_behind(*seen, weights) == behind
            if behind:
                expected = layer
                break
        assert online_pivot(*metrics, weights, low, high) == expected
        later = Metrics(*(metric.clone() for metric in metrics))
        for metric in later:
            metric[expected + 1 :] = torch.randn(6 - expected)
        assert online_pivot(*later, weights, low, high) == expected
        fired.add((expected, expected == high))
    assert len(fired) > 8


@pytest.mark.parametrize("layers", [1, 2, 3, 8, 28, 32, 48, 64])
def test_default_limits_are_layers(layers: int) -> None:
    for limits in (online_limits, paper_limits):
        low, high = limits(layers)
        assert 0 <= low <= high <= max(layers - 2, 0)
    # Section 4.3 of the paper.
    pivot = {28: 12, 64: 28}.get(layers)
    low, high = paper_limits(layers)
    assert pivot is None or low <= pivot <= high
    low, high = online_limits(layers)
    assert low >= layers // 2 or layers < 3


def test_a_pivot_within_limits() -> None:
    scores = torch.tensor([float("nan"), 9.0, 1.0, 3.0, 2.0, 3.0, 8.0, 9.0])
    assert pivot_of(scores) == 2
    assert pivot_within(scores, 3, 6) == 4  # Of equal ones the lowest.
    assert pivot_within(scores, 0, 7) == 2 and pivot_within(scores, 5, 7) == 7
    assert pivot_within(scores, 3, 3) == 3
    # Pivots 0 and 1 have no transition below them.
    assert pivot_within(scores[:2], 0, 0) == 0 and pivot_within(scores, 1, 1) == 1


def test_vllm_is_not_imported() -> None:
    code = "import sys, vllm_kvx.equations.pivot; print('vllm' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "False", ran.stderr
