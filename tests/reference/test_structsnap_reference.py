"""The StructKV and SnapKV reference against brute force and against the two alone."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import fastkv, knorm, pyramidkv, speed, structkv, structsnap
from .conftest import (
    ATOL,
    CLEAR,
    KV_HEADS,
    LAYERS,
    SAFE,
    STEPS,
    best,
    change,
    expected,
    masked,
    prompt_of,
    snapkv,
)
from .fastkv import Keep
from .knorm import Norm
from .pyramidkv import Pyramid
from .structkv import Struct
from .structsnap import StructSnap

SNAP = StructSnap(pivot=1, struct_rate=0.5, window=4, kv_rate=0.3, kernel=5)
GENERATED = prompt_of(STEPS, seed=99)


@pytest.mark.parametrize("length", [1, 9, 65])
def test_dropping_nothing_is_full(model: PreTrainedModel, length: int) -> None:
    prompt = prompt_of(length)
    full = speed.score(model, prompt, GENERATED, cutoff=None)
    for snap in (
        StructSnap(0, struct_rate=1, kv_rate=1),
        StructSnap(3, kv_budget=65),
        StructSnap(1, window=70),
    ):
        result = structsnap.score(model, prompt, GENERATED, snap)
        assert change(result, full).max() < ATOL and result.slack == float("inf")
        assert result.retained == [[list(range(length))] * len(result.retained[0])] * LAYERS
        assert result.propagated == list(range(length))


def propagated(model: PreTrainedModel, prompt: list[int], snap: StructSnap) -> list[int]:
    """Prompt positions above the pivot, from what full attention shows of the layers below."""
    n = len(prompt)
    window = list(range(n))[-snap.window :]
    most = max(int(n * snap.struct_rate), snap.window)
    if snap.pivot == LAYERS - 1 or n <= most:
        return list(range(n))
    # [layer][query head][row][column]
    probs = [layer.tolist() for layer in masked(model, prompt).probs[: snap.pivot + 1]]
    centrality = {
        j: math.fsum(
            snap.decay ** (snap.pivot - layer) * head[i][j]
            for layer, heads in enumerate(probs)
            for head in heads
            for i in window
        )
        for j in range(n - snap.window)
    }
    return best(centrality, most - snap.window) + window


@pytest.mark.parametrize(
    "snap",
    [
        SNAP,
        replace(SNAP, kv_rate=0.7),  # more than is propagated
        replace(SNAP, pivot=0, kv_rate=1.0),
        replace(SNAP, pivot=2, decay=0.5, window=1),
        replace(SNAP, struct_rate=1.0),
        replace(SNAP, pivot=3, kernel=1),
        replace(SNAP, kv_budget=11, kernel=7),
        replace(SNAP, struct_rate=0.9, decay=0.2),
    ],
)
def test_brute_force(model: PreTrainedModel, snap: StructSnap) -> None:
    prompt, everyone = prompt_of(30, seed=5), list(range(30))
    result = structsnap.score(model, prompt, GENERATED, snap)
    upper = propagated(model, prompt, snap)
    computed = [everyone if layer <= snap.pivot else upper for layer in range(LAYERS)]
    cap = snap.kv_budget or max(int(30 * snap.kv_rate), snap.window)
    # Only the propagated tokens exist above the pivot.
    attends = masked(model, prompt, lambda layer, head, i, j: j in computed[layer]).probs
    retained = [
        snapkv(probs, exist, cap, snap.window, snap.kernel, model.config.num_key_value_heads)
        for probs, exist in zip(attends, computed, strict=True)
    ]
    assert result.slack > SAFE and result.propagated == upper
    assert result.retained == retained
    brute = expected(model, prompt, GENERATED, retained, computed)
    assert change(result, brute).max() < ATOL


def test_limits_are_each_other(llama: PreTrainedModel) -> None:
    prompt = prompt_of(100)
    # Without retention it is StructKV.
    for struct in (
        Struct(1, kv_rate=1),
        Struct(2, struct_rate=0.4, kv_rate=1, decay=0.5, window=5),
    ):
        snap = StructSnap(struct.pivot, struct.struct_rate, struct.decay, struct.window, kv_rate=1)
        mine = structsnap.score(llama, prompt, GENERATED, snap)
        theirs = structkv.score(llama, prompt, GENERATED, struct)
        assert mine.propagated == theirs.propagated and mine.slack == theirs.slack
        assert mine.retained == theirs.retained and change(mine, theirs).max() == 0
    # Without propagation, or with the pivot at the last layer, it is SnapKV.
    snapkv_alone = fastkv.score(llama, prompt, GENERATED, Keep(kv_rate=0.2))
    for snap in (
        StructSnap(1, struct_rate=1, kv_rate=0.2),
        StructSnap(LAYERS - 1, struct_rate=0.1, kv_rate=0.2),
        StructSnap(LAYERS - 1, kv_budget=20),
    ):
        mine = structsnap.score(llama, prompt, GENERATED, snap)
        assert mine.propagated == list(range(100)) and mine.slack == snapkv_alone.slack
        assert mine.retained == snapkv_alone.retained
        assert change(mine, snapkv_alone).max() == 0
    # FastKV propagates by one layer too, if nothing is pooled.
    mine = structsnap.score(llama, prompt, GENERATED, StructSnap(0, kv_rate=0.15, kernel=1))
    keep = Keep(tsp_layer=0, tsp_rate=0.2, kv_rate=0.15, kernel=1)
    theirs = fastkv.score(llama, prompt, GENERATED, keep)
    assert mine.propagated == theirs.propagated and mine.retained == theirs.retained
    assert change(mine, theirs).max() < ATOL


def test_other_methods_retain(llama: PreTrainedModel) -> None:
    """What retains knows the layer, its rows and the prompt, and does not change propagation."""
    prompt, norm, pyramid = prompt_of(100), Norm(kv_rate=0.15), Pyramid(kv_rate=0.15)
    caps = pyramid.caps(LAYERS, 100)

    def shortest(
        probs: Tensor, key: Tensor, positions: Tensor, prompt_len: int, layer: int
    ) -> tuple[Tensor, float]:
        assert prompt_len == 100 and key.shape[:2] == (KV_HEADS, len(positions))
        return knorm.retain(key, prompt_len, norm)

    def falling(
        probs: Tensor, key: Tensor, positions: Tensor, prompt_len: int, layer: int
    ) -> tuple[Tensor, float]:
        assert probs.shape[1:] == (len(positions), len(positions))
        keep = Keep(kv_budget=caps[layer])
        return fastkv.retain(probs, key.shape[0], positions, prompt_len, keep)

    base = structsnap.score(llama, prompt, GENERATED, StructSnap(1))
    for retain, alone in (
        (shortest, knorm.score(llama, prompt, GENERATED, norm)),
        (falling, pyramidkv.score(llama, prompt, GENERATED, pyramid)),
    ):
        mine = structsnap.score(llama, prompt, GENERATED, StructSnap(1, retain=retain))
        assert mine.propagated == base.propagated and len(base.propagated) == 20
        # Up to the pivot the layers are those of a model without propagation.
        assert mine.retained[:2] == alone.retained[:2] != base.retained[:2]
        assert all(
            set(head) <= set(base.propagated) for layer in mine.retained[2:] for head in layer
        )
        flat = structsnap.score(llama, prompt, GENERATED, StructSnap(LAYERS - 1, retain=retain))
        assert flat.retained == alone.retained and change(flat, alone).max() == 0
    sizes = [[len(head) for head in layer] for layer in mine.retained]
    assert sizes == [[cap] * KV_HEADS for cap in (caps[0], caps[1], min(caps[2], 20), caps[3])]


def test_generated_tokens_stay(llama: PreTrainedModel) -> None:
    prompt = prompt_of(60)
    context, row = structsnap.prefill(llama, prompt, SNAP)
    rows = [row, *(fastkv.decode(llama, context, [token]) for token in GENERATED[:-1])]
    scored = structsnap.score(llama, prompt, GENERATED, SNAP)
    assert (torch.cat(rows) - scored.logprobs).abs().max() < ATOL
    for key, value in context.stored:
        assert key.shape[:2] == value.shape[:2] == (KV_HEADS, 18 + STEPS - 1)


def test_every_part_of_the_policy_shows(model: PreTrainedModel) -> None:
    """A wrong pivot, rate, decay, window, kernel or KV head must not pass unnoticed."""
    prompt, generated = prompt_of(300, seed=300), prompt_of(12, seed=98)
    snap = StructSnap(1, struct_rate=0.4, kv_rate=0.25)
    result = structsnap.score(model, prompt, generated, snap)
    for layer in result.retained:
        assert len({tuple(head) for head in layer}) > 1
    for wrong in (
        {"pivot": 0},
        {"pivot": 2},
        {"struct_rate": 0.5},
        {"struct_rate": 1.0},
        {"decay": 0.1},
        {"window": 5},
        {"kv_rate": 0.3},
        {"kv_budget": 100},
        {"kernel": 1},
        {"kernel": 5},
    ):
        other = structsnap.score(model, prompt, generated, replace(snap, **wrong))
        assert change(other, result).median() > CLEAR, wrong


def test_slack_is_the_distance_to_another_choice(llama: PreTrainedModel) -> None:
    """Float64 decides as float32 does wherever the slack says so."""
    prompt = prompt_of(200, seed=3)
    result = structsnap.score(llama, prompt, GENERATED, SNAP)
    assert SAFE < result.slack < 0.5
    # Either kind of selection counts.
    for alone in (replace(SNAP, kv_rate=1.0), replace(SNAP, struct_rate=1.0)):
        assert SAFE < structsnap.score(llama, prompt, GENERATED, alone).slack < 0.5
    try:
        exact = structsnap.score(llama.double(), prompt, GENERATED, SNAP)
    finally:
        llama.float()
    assert exact.retained == result.retained and exact.propagated == result.propagated
    assert exact.slack == pytest.approx(result.slack, abs=SAFE / 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 0}, "window"),
        ({"kernel": 4}, "odd"),
        ({"struct_rate": 0}, "rates"),
        ({"decay": 0}, "rates"),
    ],
)
def test_bad_policies(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructSnap(1, **wrong)


def test_a_pivot_that_the_model_has_not(llama: PreTrainedModel) -> None:
    for pivot in (-1, LAYERS):
        with pytest.raises(ValueError, match="4 layers"):
            structsnap.score(llama, prompt_of(40), GENERATED, StructSnap(pivot))
