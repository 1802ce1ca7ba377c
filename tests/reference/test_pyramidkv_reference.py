"""The PyramidKV reference against brute force, against SnapKV, and against its definition."""

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise, product

import pytest
import torch
from transformers import PreTrainedModel

from . import fastkv, pyramidkv, speed
from .conftest import (
    ATOL,
    CLEAR,
    KV_HEADS,
    LAYERS,
    SAFE,
    STEPS,
    change,
    expected,
    masked,
    prompt_of,
    snapkv,
)
from .fastkv import Keep
from .pyramidkv import Pyramid

PYRAMID = Pyramid(kv_rate=0.4, window=4, kernel=5, beta=4)
GENERATED = prompt_of(STEPS, seed=99)


@dataclass(frozen=True)
class Case:
    pyramid: Pyramid
    layers: int
    prompt_len: int
    outside: list[int]  # rows outside the window, by layer


@pytest.mark.parametrize(
    "case",
    [
        # 6 on average, 3 at the top: 9 7 5 3.
        Case(Pyramid(kv_budget=14, beta=2), 4, 100, [9, 7, 5, 3]),
        Case(Pyramid(kv_rate=0.14, beta=2), 4, 100, [9, 7, 5, 3]),
        Case(Pyramid(kv_budget=14, beta=2, groups=2), 4, 100, [8, 8, 4, 4]),
        Case(Pyramid(kv_budget=14, beta=2, groups=3), 4, 100, [8, 8, 4, 4]),  # stages of two
        Case(Pyramid(kv_budget=14, beta=2, groups=1), 4, 100, [6] * 4),
        Case(Pyramid(kv_rate=0.01, kv_floor=14, beta=2), 4, 100, [9, 7, 5, 3]),
        Case(Pyramid(kv_budget=14, beta=1), 4, 100, [6] * 4),
        # 9 7.5 6 4.5 3 in stages of two, two and one: 16.5 and 11 leave 0.5 and 1 to carry.
        Case(Pyramid(kv_budget=14, beta=2, groups=3), 5, 100, [8, 8, 5, 5, 4]),
        # 1.5 1 0.5: a half is carried twice.
        Case(Pyramid(kv_budget=9, beta=2), 3, 100, [1, 1, 1]),
        # 1.95 1.32 0.68 0.05: what is carried can lift a layer above the one below it.
        Case(Pyramid(kv_budget=9), 4, 100, [1, 2, 0, 1]),
        # 6 on average, but the prompt has 8 outside the window: 8 to 4.
        Case(Pyramid(kv_budget=14, beta=2), 3, 16, [8, 6, 4]),
        Case(Pyramid(kv_budget=14, beta=2), 3, 17, [9, 6, 3]),  # exactly as much as there is
        Case(Pyramid(kv_budget=16), 3, 16, [8, 8, 8]),
        Case(Pyramid(kv_budget=99), 3, 16, [8, 8, 8]),
        Case(Pyramid(kv_budget=14), 1, 100, [6]),
        Case(Pyramid(kv_budget=3), 3, 100, [0, 0, 0]),  # the window alone
        Case(Pyramid(kv_rate=0.01), 3, 9, [0, 0, 0]),
        Case(Pyramid(), 3, 8, [0, 0, 0]),
        Case(Pyramid(), 3, 5, [-3, -3, -3]),  # shorter than the window
    ],
)
def test_caps_by_hand(case: Case) -> None:
    window = case.pyramid.window
    caps = case.pyramid.caps(case.layers, case.prompt_len)
    assert caps == [window + rows for rows in case.outside]


def test_caps_in_whole_numbers() -> None:
    """Against the definition times every denominator, one row at a time."""
    cases = product((1, 2, 3, 8, 9, 28, 36), (40, 200), (9, 15, 37, 80), (1, 3, 20), (1, 3, 8, 99))
    for layers, n, budget, beta, groups in cases:
        pyramid = Pyramid(kv_budget=budget, beta=beta, groups=groups)
        window = pyramid.window
        mean = min(budget, n)
        share, unit = mean - window, beta * max(layers - 1, 1)  # all budgets are whole units
        low, high = share * unit // beta, 2 * share * unit - share * unit // beta
        if high > (n - window) * unit:
            high = (n - window) * unit
            low = 2 * share * unit - high
        if layers == 1:
            high = share * unit
        ideals = [high - (high - low) * k // max(layers - 1, 1) for k in range(layers)]
        assert 2 * sum(ideals) == layers * 2 * share * unit
        size = -(-layers // groups)
        left, rows = 0, []
        for start in range(0, layers, size):
            stage = range(layers)[start : start + size]
            left += sum(ideals[k] for k in stage)
            each = 0
            while left >= len(stage) * unit:
                left, each = left - len(stage) * unit, each + 1
            rows += [each] * len(stage)

        caps = pyramid.caps(layers, n)
        assert caps == [window + each for each in rows]
        last = layers - size * ((layers - 1) // size)
        assert 0 <= layers * mean - sum(caps) < last
        assert all(window <= cap <= n for cap in caps)
        stages = [caps[start : start + size] for start in range(0, layers, size)]
        assert len(stages) <= groups and all(len(set(stage)) == 1 for stage in stages)
        # A stage carries less than one row per layer to the stage above, which may be smaller.
        starts = range(0, layers, size)
        means = [
            Fraction(sum(ideals[k : k + size]), unit * len(ideals[k : k + size])) for k in starts
        ]
        for k, (lower, upper) in enumerate(pairwise(stages)):
            if means[k] - means[k + 1] >= Fraction(len(lower), len(upper)):
                assert lower[0] >= upper[0]


@pytest.mark.parametrize("groups", [4, 8, 28])
def test_caps_fall(groups: int) -> None:
    caps = Pyramid(kv_rate=0.1, groups=groups).caps(28, 4000)
    assert caps == sorted(caps, reverse=True)
    # A pyramid's top is a twentieth of the mean, and its bottom nearly twice the mean.
    assert caps[0] < 2 * 400 and caps[-1] >= 8 + 392 // 20
    assert len(set(caps)) == {4: 4, 8: 7, 28: 28}[groups]  # at most eight are seven of four


@pytest.mark.parametrize("length", [1, 4, 9, 65])
def test_keeping_all_is_full(model: PreTrainedModel, length: int) -> None:
    prompt = prompt_of(length)
    full = speed.score(model, prompt, GENERATED, cutoff=None)
    for pyramid in (Pyramid(kv_rate=1), Pyramid(kv_budget=65, beta=2), Pyramid(window=70)):
        result = pyramidkv.score(model, prompt, GENERATED, pyramid)
        assert change(result, full).max() < ATOL and result.slack == float("inf")
        assert result.retained == [[list(range(length))] * len(result.retained[0])] * LAYERS
        assert result.propagated == list(range(length))


@pytest.mark.parametrize(
    "pyramid",
    [
        PYRAMID,
        replace(PYRAMID, groups=2),
        replace(PYRAMID, groups=3, beta=20, kv_budget=9),
        replace(PYRAMID, window=1, kernel=1, kv_budget=7),
        replace(PYRAMID, kv_rate=0.8),  # the bottom keeps all
    ],
)
def test_brute_force(model: PreTrainedModel, pyramid: Pyramid) -> None:
    prompt = prompt_of(30, seed=5)
    result = pyramidkv.score(model, prompt, GENERATED, pyramid)
    kv_heads, exist = model.config.num_key_value_heads, list(range(30))
    retained = [
        snapkv(probs, exist, cap, pyramid.window, pyramid.kernel, kv_heads)
        for probs, cap in zip(masked(model, prompt).probs, pyramid.caps(LAYERS, 30), strict=True)
    ]
    assert result.slack > SAFE and result.retained == retained
    assert result.propagated == exist
    assert change(result, expected(model, prompt, GENERATED, retained)).max() < ATOL


def test_a_flat_pyramid_is_snapkv(llama: PreTrainedModel) -> None:
    prompt = prompt_of(60)
    snap = fastkv.score(llama, prompt, GENERATED, Keep(kv_rate=0.2))
    for same in (
        Pyramid(kv_rate=0.2, beta=1),
        Pyramid(kv_rate=0.2, groups=1),
        Pyramid(kv_budget=12, beta=1, groups=2),
    ):
        flat = pyramidkv.score(llama, prompt, GENERATED, same)
        assert flat.retained == snap.retained and flat.slack == snap.slack
        assert change(flat, snap).max() == 0
    # Every layer is SnapKV with its own budget.
    pyramid = Pyramid(kv_rate=0.3)
    mine = pyramidkv.score(llama, prompt, GENERATED, pyramid)
    caps = pyramid.caps(LAYERS, 60)
    assert len(set(caps)) == LAYERS
    for index, cap in enumerate(caps):
        alone = fastkv.score(llama, prompt, GENERATED, Keep(kv_budget=cap))
        assert mine.retained[index] == alone.retained[index]
        assert [len(head) for head in mine.retained[index]] == [cap] * KV_HEADS


def test_generated_tokens_stay(llama: PreTrainedModel) -> None:
    prompt = prompt_of(60)
    context, row = pyramidkv.prefill(llama, prompt, PYRAMID)
    rows = [row, *(fastkv.decode(llama, context, [token]) for token in GENERATED[:-1])]
    scored = pyramidkv.score(llama, prompt, GENERATED, PYRAMID)
    assert (torch.cat(rows) - scored.logprobs).abs().max() < ATOL
    for (key, value), cap in zip(context.stored, PYRAMID.caps(LAYERS, 60), strict=True):
        assert key.shape[:2] == value.shape[:2] == (KV_HEADS, cap + STEPS - 1)


def test_every_part_of_the_policy_shows(model: PreTrainedModel) -> None:
    """A wrong rate, window, kernel or pyramid must not pass unnoticed."""
    prompt, generated = prompt_of(300, seed=300), prompt_of(12, seed=98)
    pyramid = Pyramid(kv_rate=0.2)
    result = pyramidkv.score(model, prompt, generated, pyramid)
    assert any(len({tuple(head) for head in layer}) > 1 for layer in result.retained)
    for wrong in (
        {"kv_rate": 0.15},
        {"kv_rate": 1.0},
        {"window": 7},
        {"kernel": 5},
        {"beta": 1},
        {"beta": 5},
        {"groups": 2},
    ):
        other = pyramidkv.score(model, prompt, generated, replace(pyramid, **wrong))
        assert change(other, result).median() > CLEAR, wrong


def test_slack_is_the_distance_to_another_choice(llama: PreTrainedModel) -> None:
    """Float64 decides as float32 does wherever the slack says so."""
    prompt = prompt_of(200, seed=3)
    result = pyramidkv.score(llama, prompt, GENERATED, PYRAMID)
    assert SAFE < result.slack < 0.5
    try:
        exact = pyramidkv.score(llama.double(), prompt, GENERATED, PYRAMID)
    finally:
        llama.float()
    assert exact.retained == result.retained
    assert exact.slack == pytest.approx(result.slack, abs=SAFE / 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 0}, "window"),
        ({"kernel": 4}, "odd"),
        ({"beta": 0}, "beta"),
        ({"groups": 0}, "groups"),
    ],
)
def test_bad_policies(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pyramid(**wrong)
