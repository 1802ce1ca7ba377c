"""The Knorm reference against brute force, by hand, and against its definition."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from . import fastkv, knorm, speed
from .conftest import (
    ATOL,
    CLEAR,
    KV_HEADS,
    LAYERS,
    SAFE,
    STEPS,
    VOCAB,
    best,
    change,
    expected,
    masked,
    prompt_of,
)
from .knorm import Norm

GENERATED = prompt_of(STEPS, seed=99)


def distinct(length: int, seed: int = 0) -> list[int]:
    """A prompt without repetitions: one token's keys in the lowest layer have one norm."""
    generator = torch.Generator().manual_seed(seed)
    return (3 + torch.randperm(VOCAB - 3, generator=generator)[:length]).tolist()


@pytest.mark.parametrize("length", [1, 9, 65])
def test_keeping_all_is_full(model: PreTrainedModel, length: int) -> None:
    prompt = prompt_of(length)
    full = speed.score(model, prompt, GENERATED, cutoff=None)
    for norm in (Norm(kv_rate=1), Norm(kv_budget=65), Norm(kv_budget=1000)):
        result = knorm.score(model, prompt, GENERATED, norm)
        assert change(result, full).max() < ATOL and result.slack == float("inf")
        assert result.retained == [[list(range(length))] * len(result.retained[0])] * LAYERS
        assert result.propagated == list(range(length))


@pytest.mark.parametrize("norm", [Norm(kv_rate=0.3), Norm(kv_budget=1), Norm(kv_budget=29)])
def test_brute_force(model: PreTrainedModel, norm: Norm) -> None:
    prompt = distinct(30, seed=5)
    result = knorm.score(model, prompt, GENERATED, norm)
    cap = norm.kv_budget or 9
    norms = [
        [[math.hypot(*row) for row in head] for head in key.tolist()]
        for key in masked(model, prompt).keys
    ]
    retained = [
        [best({j: -x for j, x in enumerate(head)}, cap) for head in layer] for layer in norms
    ]
    edges = [sorted(head)[cap - 1 : cap + 1] for layer in norms for head in layer]
    assert result.slack == pytest.approx(min(1 - a / b for a, b in edges), abs=SAFE / 10)
    assert result.slack > SAFE and result.retained == retained
    assert change(result, expected(model, prompt, GENERATED, retained)).max() < ATOL


def test_norms_are_the_same_before_rotation(model: PreTrainedModel) -> None:
    """Rotation keeps a key's length, and the lowest layer's keys have no context."""
    prompt = distinct(40, seed=6)
    attn = model.model.layers[0].self_attn
    with torch.no_grad():
        hidden = model.model.embed_tokens(torch.tensor(prompt))
        key = attn.k_proj(model.model.layers[0].input_layernorm(hidden))
        key = key.view(40, -1, attn.head_dim)
        if hasattr(attn, "k_norm"):
            key = attn.k_norm(key)
    result = knorm.score(model, prompt, GENERATED, Norm(kv_rate=0.25))
    for head, kept in enumerate(result.retained[0]):
        norms, order = key[:, head].norm(dim=-1).sort()
        assert norms[10] - norms[9] > 1e-5 * norms[10]  # more than rounding
        assert kept == order[:10].sort().values.tolist()


def test_lowest_by_hand() -> None:
    norms = torch.tensor([8.0, 2.0, 2.0, 2.0, 4.0, 1.0, 4.0])
    for count, kept, slack in (
        (1, [5], 1 / 2),
        (2, [1, 5], 1 / 2),  # among the twos: the next other norms are 1 and 4
        (3, [1, 2, 5], 1 / 2),
        (4, [1, 2, 3, 5], 1 / 2),
        (5, [1, 2, 3, 4, 5], 1 / 2),
        (6, [1, 2, 3, 4, 5, 6], 1 / 2),
        (7, [0, 1, 2, 3, 4, 5, 6], float("inf")),
    ):
        rows, gap = knorm.lowest(norms, count)
        assert (rows.tolist(), gap) == (kept, slack), count
    assert knorm.lowest(torch.ones(5), 2)[0].tolist() == [0, 1]
    assert knorm.lowest(torch.ones(5), 2)[1] == float("inf")
    # The nearest of the other norms, on either side.
    assert knorm.lowest(torch.tensor([1.0, 4, 5, 5, 16]), 3)[1] == pytest.approx(1 / 5)
    assert knorm.lowest(torch.tensor([1.0, 3, 5, 5, 6, 16]), 3)[1] == pytest.approx(1 / 6)
    assert knorm.lowest(torch.tensor([0.0, 0, 2]), 1)[1] == 1
    assert knorm.lowest(torch.zeros(1000), 300)[0].tolist() == list(range(300))


def test_keys_by_hand() -> None:
    """Heads choose on their own, equal keys have equal norms, and the last row has no privilege."""
    key = torch.tensor(
        [[[3.0, 4], [6, 0], [4, 3], [0, 1], [5, 5]], [[9, 9], [1, 0], [2, 0], [0, 3], [0, 4]]]
    )
    for count, kept, slack in (
        (1, [[3], [1]], 1 / 2),
        (2, [[0, 3], [1, 2]], 1 / 6),
        (3, [[0, 2, 3], [1, 2, 3]], 1 / 6),
    ):
        rows, gap = knorm.retain(key, 5, Norm(kv_budget=count))
        assert rows.tolist() == kept and gap == pytest.approx(slack), count
    # The prompt, not the rows that are here, says how many rows stay.
    assert knorm.retain(key, 20, Norm(kv_rate=0.1))[0].tolist() == [[0, 3], [1, 2]]
    assert knorm.retain(key, 50, Norm(kv_rate=0.1))[0].tolist() == [list(range(5))] * 2
    assert knorm.retain(key, 20, Norm(kv_rate=0.01, kv_floor=2))[0].tolist() == [[0, 3], [1, 2]]
    same = torch.rand(2, 1, 77, generator=torch.Generator().manual_seed(0)).expand(-1, 90, -1)
    assert knorm.retain(same, 90, Norm(kv_budget=11))[0].tolist() == [list(range(11))] * 2


def test_counts(llama: PreTrainedModel) -> None:
    for norm, length, kept in (
        (Norm(), 7, 1),
        (Norm(), 101, 10),
        (Norm(kv_rate=0.29), 100, 28),  # int(28.999999999999996)
        (Norm(kv_rate=1.0, kv_budget=33), 101, 33),
        (Norm(kv_budget=33), 20, 20),
    ):
        assert norm.cap(length) == kept
        result = knorm.score(llama, prompt_of(length), GENERATED, norm)
        assert [[len(head) for head in layer] for layer in result.retained] == (
            [[kept] * KV_HEADS] * LAYERS
        )
        assert all(head == sorted(set(head)) for layer in result.retained for head in layer)


def test_generated_tokens_stay(llama: PreTrainedModel) -> None:
    prompt, norm = prompt_of(60), Norm(kv_budget=5)
    context, row = knorm.prefill(llama, prompt, norm)
    rows = [row, *(fastkv.decode(llama, context, [token]) for token in GENERATED[:-1])]
    scored = knorm.score(llama, prompt, GENERATED, norm)
    assert (torch.cat(rows) - scored.logprobs).abs().max() < ATOL
    for key, value in context.stored:
        assert key.shape[:2] == value.shape[:2] == (KV_HEADS, 5 + STEPS - 1)
    # The first token comes from prefill, which retention does not touch.
    full = speed.score(llama, prompt, GENERATED, cutoff=None)
    assert change(scored, full)[0] < ATOL and change(scored, full)[1:].min() > CLEAR


def test_every_part_of_the_policy_shows(model: PreTrainedModel) -> None:
    """A wrong rate, and the longest keys in place of the shortest, must not pass unnoticed."""
    prompt, generated, norm = distinct(300, seed=300), prompt_of(12, seed=98), Norm(kv_rate=0.2)
    result = knorm.score(model, prompt, generated, norm)
    assert any(len({tuple(head) for head in layer}) > 1 for layer in result.retained)
    assert any(299 not in head for layer in result.retained for head in layer)
    for wrong in ({"kv_rate": 0.15}, {"kv_rate": 1.0}, {"kv_budget": 70}):
        other = knorm.score(model, prompt, generated, replace(norm, **wrong))
        assert change(other, result).median() > CLEAR, wrong


def test_slack_is_the_distance_to_another_choice(llama: PreTrainedModel) -> None:
    """Float64 decides as float32 does wherever the slack says so."""
    prompt, norm = distinct(60, seed=3), Norm(kv_rate=0.3)
    result = knorm.score(llama, prompt, GENERATED, norm)
    assert SAFE < result.slack < 0.5
    try:
        exact = knorm.score(llama.double(), prompt, GENERATED, norm)
    finally:
        llama.float()
    assert exact.retained == result.retained
    assert exact.slack == pytest.approx(result.slack, abs=SAFE / 2)


def test_a_repeated_token_is_a_near_tie(llama: PreTrainedModel) -> None:
    """In the lowest layer, where rotation alone tells one token's keys apart, by rounding."""
    result = knorm.score(llama, [7] * 40, GENERATED, Norm(kv_budget=10))
    assert result.slack < 1e-6


def test_bad_policies() -> None:
    with pytest.raises(ValueError, match="kv_budget"):
        Norm(kv_budget=0)
