"""The FIER and Quest reference against the other references, brute force, and its definition."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, PreTrainedModel

from . import fastkv, fier, structkv
from .conftest import ATOL, CLEAR, FIER, KV_HEADS, QUEST, STEPS, change, prompt_of
from .fastkv import Keep
from .fier import Retrieve
from .structkv import Struct

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 5
FASTKV = Keep(tsp_layer=1, tsp_rate=0.8, kv_rate=0.6, window=4, kernel=5)


def entries(result: fier.ReadResult) -> list[list[list[list[int]]]]:
    """What was read, [step][layer][KV head]."""
    return [[[c.entries for c in layer] for layer in step] for step in result.choices]


def all_choices(result: fier.ReadResult, layers: slice) -> Iterator[fier.Choice]:
    return (c for step in result.choices for layer in step[layers] for c in layer)


KEEPS: list[tuple[Keep | Struct, Any]] = [
    (Keep(), fastkv),
    (FASTKV, fastkv),
    (Keep(kv_budget=30), fastkv),
    (Keep(cutoff=3, anchors=18, tail=9), fastkv),
    (Keep(sinks=4, recent=30), fastkv),
    (Struct(pivot=1, struct_rate=0.7, kv_rate=0.5), structkv),
    (Struct(pivot=2, struct_rate=0.7, kv_rate=0.5, block_size=4), structkv),
]


@pytest.mark.parametrize("length", [1, 9, 65])
def test_reading_all_is_the_policy_alone(llama: PreTrainedModel, length: int) -> None:
    prompt, everything = prompt_of(length), max(length + 2, 8)
    readings = [
        Retrieve(budget=everything, group=8),
        Retrieve(budget=everything, group=8, pages=True, reduction="sum"),
        replace(FIER, dense_layers=LAYERS),
        replace(FIER, dense_below=everything + 1),
    ]
    for i, (keep, reference) in enumerate(KEEPS):
        expected = reference.generate(llama, prompt, keep, max_tokens=3)
        for retrieve in (readings[i % 4], readings[(i + 1) % 4]):
            actual = fier.generate(llama, prompt, retrieve, keep, max_tokens=3)
            assert actual.tokens == expected.tokens and actual.clear_steps == 3
            assert change(actual, expected).max() < ATOL
            assert (actual.retained, actual.slack) == (expected.retained, expected.slack)
            for choice in all_choices(actual, slice(None)):
                assert choice.entries == list(range(len(choice.positions)))
                assert choice.margin == choice.slack == float("inf")


def brute_pick(
    queries: np.ndarray, keys: np.ndarray, retrieve: Retrieve, scaling: float
) -> list[int]:
    """Entries to read, from the definition: float32 queries (h, D), keys (n, D), Python loops."""
    n, size = len(keys), retrieve.group
    if n <= retrieve.budget or n < retrieve.dense_below:
        return list(range(n))
    groups = 0
    while (groups + 1) * size < n:  # All that are full without the step's own token.
        groups += 1
    per_head: list[list[float]] = []
    for query in queries.tolist():
        scores = []
        for group in range(groups):
            members = keys[group * size : (group + 1) * size]
            middle, half, greatest, least = [], [], [], []
            for column in members.T:
                z = (column.max() + column.min()) / np.float32(2)
                s = (column.max() - column.min()) / np.float32(2)
                middle.append(z)
                half.append(float(np.float16(s)))
                greatest.append(float(np.float16(z)) + half[-1])
                least.append(float(np.float16(z)) - half[-1])
            if retrieve.pages:
                pairs = zip(query, greatest, least, strict=True)
                scores.append(sum(max(q * a, q * b) for q, a, b in pairs))
                continue
            for key in members:
                copy = [
                    a if k >= z else b
                    for k, z, a, b in zip(key, middle, greatest, least, strict=True)
                ]
                scores.append(sum(q * k for q, k in zip(query, copy, strict=True)))
        per_head.append(scores)
    if retrieve.reduction == "softmax":
        weights = [[np.exp(scaling * x / 2) for x in scores] for scores in per_head]
        per_head = [[w / sum(row) for w in row] for row in weights]
    reduce = max if retrieve.reduction == "max" else sum
    final = [reduce(column) for column in zip(*per_head, strict=True)]
    order = sorted(range(len(final)), key=lambda unit: (-final[unit], unit))
    newest = list(range(groups * size, n))
    if retrieve.pages:
        count = retrieve.budget // size - 1
        read = [unit * size + i for unit in order[:count] for i in range(size)]
    else:
        read = order[: max(retrieve.budget - len(newest), 0)]
    return sorted(read) + newest


def brute(
    model: PreTrainedModel,
    prompt: list[int],
    generated: list[int],
    retrieve: Retrieve,
    keep: Keep | Struct,
    slots: fier.Slots,
) -> tuple[torch.Tensor, list[list[list[list[int]]]]]:
    """Logprobs and entries: transformers' own layers over all tokens, with attention of ours.

    Dropped prompt rows are computed, and nobody reads them. `slots` says what generated tokens
    see of the prompt.
    """
    n, total = len(prompt), len(prompt) + len(generated) - 1
    chosen: list[list[list[list[int]]]] = [
        [[[] for _ in heads] for heads in slots] for _ in generated[1:]
    ]
    # Which prompt rows the layers compute is the other references' own business, tested there.
    context = fier.prefill(model, prompt, keep)[0].context

    def exists(layer: int) -> list[int]:
        if isinstance(keep, Keep) and keep.cutoff is not None and layer >= keep.cutoff:
            return [j for j in range(n) if j < keep.anchors or j >= n - keep.tail]
        last = keep.pivot if isinstance(keep, Struct) else keep.tsp_layer
        return context.propagated if last is not None and layer > last else list(range(n))

    def attention(module: Any, q: Any, k: Any, v: Any, *_: Any, scaling: float, **__: Any) -> Any:
        layer, share = module.layer_idx, q.shape[1] // k.shape[1]
        mask = torch.full((q.shape[1], total, total), float("-inf"))
        mask.diagonal(dim1=1, dim2=2).fill_(0)
        for i in range(n):
            mask[:, i, [j for j in exists(layer) if j <= i]] = 0
        for step, i in enumerate(range(n, total)):
            for head in range(k.shape[1]):
                stored = slots[layer][head] + list(range(n, i + 1))
                read = list(range(len(stored)))
                mine = slice(head * share, (head + 1) * share)
                if layer >= retrieve.dense_layers:
                    keys = k[0, head, stored].numpy()
                    read = brute_pick(q[0, mine, i].numpy(), keys, retrieve, scaling)
                chosen[step][layer][head] = read
                mask[mine, i, [stored[entry] for entry in read]] = 0
        k, v = (x[0].repeat_interleave(share, dim=0) for x in (k, v))
        probs = (q[0] @ k.transpose(1, 2) * scaling + mask).softmax(dim=-1)
        return (probs @ v).transpose(0, 1)[None], probs

    AttentionInterface.register("brute", attention)
    usual = model.config._attn_implementation
    model.config._attn_implementation = "brute"
    try:
        with torch.no_grad():
            hidden = model.model.embed_tokens(torch.tensor([prompt + generated[:-1]]))
            rotary = model.model.rotary_emb(hidden, torch.arange(total)[None])
            for layer in model.model.layers:
                hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
            rows = model.lm_head(model.model.norm(hidden))[0, n - 1 :].log_softmax(dim=-1)
    finally:
        model.config._attn_implementation = usual
    return rows, chosen


def assert_brute(
    model: PreTrainedModel,
    length: int,
    retrieve: Retrieve,
    keep: Keep | Struct = fier.FULL,
    steps: int = STEPS,
    slots: fier.Slots | None = None,
) -> fier.ReadResult:
    prompt = prompt_of(length, seed=5)
    result = fier.generate(model, prompt, retrieve, keep, slots=slots, max_tokens=steps)
    assert slots is None or result.slots == slots
    rows, chosen = brute(model, prompt, result.tokens, retrieve, keep, result.slots)
    clear = result.clear_steps
    assert clear > 1
    assert entries(result)[: clear - 1] == chosen[: clear - 1]
    assert (result.logprobs - rows)[:clear].abs().max() < ATOL
    return result


@pytest.mark.parametrize("retrieve", [FIER, replace(QUEST, reduction="softmax")], ids=str)
def test_brute_force(model: PreTrainedModel, retrieve: Retrieve) -> None:
    assert_brute(model, 30, retrieve)


@pytest.mark.parametrize(
    "retrieve",
    [
        replace(FIER, reduction="sum", dense_layers=0),
        replace(FIER, reduction="softmax", dense_layers=1),
        replace(FIER, budget=6),  # less than the newest group, which is read all the same
        replace(FIER, dense_below=33),
        QUEST,
        replace(QUEST, reduction="sum", budget=23),
        replace(QUEST, budget=4),
    ],
    ids=str,
)
def test_brute_force_of_each_parameter(llama: PreTrainedModel, retrieve: Retrieve) -> None:
    assert_brute(llama, 30, retrieve)


@pytest.mark.parametrize("retrieve", [FIER, QUEST], ids=str)
def test_generated_tokens_join_later_groups(llama: PreTrainedModel, retrieve: Retrieve) -> None:
    """Also with a prompt so short that most groups hold nothing else."""
    result = assert_brute(llama, 11, replace(retrieve, budget=12), steps=24)
    assert result.clear_steps > 18
    read, skipped = set(), set()
    for step, layers in enumerate(result.choices):
        newest = (11 + step) // retrieve.group * retrieve.group
        for choice in layers[-1]:
            read |= {11 <= entry < newest for entry in choice.entries}
            skipped |= set(range(11, newest)) - set(choice.entries)
    assert True in read and skipped


@pytest.mark.parametrize("keep", [keep for keep, _ in KEEPS[1:]], ids=str)
def test_brute_force_with_retention(llama: PreTrainedModel, keep: Keep | Struct) -> None:
    for retrieve in (FIER, replace(QUEST, budget=12)):
        result = assert_brute(llama, 50, replace(retrieve, dense_layers=1), keep)
        # Retention itself must not hang on rounding.
        assert result.slack > 1e-4
        in_order = [[sorted(head) for head in layer] for layer in result.slots]
        assert in_order == result.retained
        moves = keep.cutoff is None if isinstance(keep, Keep) else keep.block_size is None
        assert (result.slots != in_order) == moves


def test_slots_of_any_order_and_part(llama: PreTrainedModel) -> None:
    """The order of the slots decides which keys share a scale, and which group is the newest."""
    generator = torch.Generator().manual_seed(0)
    slots = [
        [
            torch.randperm(40, generator=generator)[: 40 - 3 * layer].tolist()
            for _ in range(KV_HEADS)
        ]
        for layer in range(LAYERS)
    ]
    shuffled = assert_brute(llama, 40, FIER, slots=slots)
    for step in shuffled.choices:
        for layer, heads in enumerate(step):
            for head, choice in enumerate(heads):
                read = [slots[layer][head] + list(range(40, 99))][0]
                assert choice.positions == sorted(read[entry] for entry in choice.entries)
    in_order = [[sorted(head) for head in heads] for heads in slots]
    other = fier.score(llama, prompt_of(40, seed=5), shuffled.tokens, FIER, slots=in_order)
    assert change(other, shuffled)[0] == 0 and change(other, shuffled)[1:].min() > CLEAR
    with pytest.raises(ValueError, match="41"):
        slots[0][1][3] = 41
        fier.generate(llama, prompt_of(40), FIER, slots=slots, max_tokens=1)


def test_where_retention_leaves_a_prompt(llama: PreTrainedModel) -> None:
    """What a layer computed decides which of its slots become free."""
    prompt = prompt_of(50)

    def slots(keep: Keep | Struct) -> tuple[fier.Slots, fastkv.Context]:
        store, _ = fier.prefill(llama, prompt, keep)
        return store.slots, store.context

    # More than half of the prompt stays, so that recent tokens lie on either side of the cap.
    found, _ = slots(Keep(sinks=3, recent=25, cutoff=2, anchors=3, tail=24))
    assert found[0][0] == [0, 1, 2, *range(28, 50), *range(25, 28)]
    assert found[2:] == [[[0, 1, 2, *range(26, 50)]] * KV_HEADS] * 3
    for keep in (FASTKV, Struct(pivot=1, struct_rate=0.8, kv_rate=0.6, window=4)):
        found, context = slots(keep)
        assert len(context.propagated) == 40
        for layer, heads in enumerate(found):
            computed = list(range(50)) if layer <= 1 else context.propagated
            for head, order in enumerate(heads):
                assert sorted(order) == context.retained[layer][head] and len(order) == 30
                stays = [p for p in computed[:30] if p in order]
                assert all(order[computed.index(p)] == p for p in stays)
                moved = [p for p in order if p not in stays]
                assert moved == [p for p in computed[30:] if p in order] and moved


def test_float64_agrees_as_far_as_choices_are_clear(llama: PreTrainedModel) -> None:
    for seed in range(4):
        prompt = prompt_of(60 + seed, seed)
        run = fier.generate(llama, prompt, FIER, max_tokens=STEPS)
        try:
            exact = fier.score(llama.double(), prompt, run.tokens, FIER)
        finally:
            llama.float()
        clear = run.clear_steps
        assert entries(run)[: clear - 1] == entries(exact)[: clear - 1]
        assert change(run, exact)[:clear].max() < ATOL


def test_clear_steps_end_at_the_first_doubt(llama: PreTrainedModel) -> None:
    run = fier.generate(llama, prompt_of(40), FIER, max_tokens=STEPS)
    sure = replace(run.choices[2][3][0], slack=1e-9)
    choices = [[[sure] * KV_HEADS] * LAYERS for _ in range(STEPS - 1)]
    assert replace(run, choices=choices).clear_steps == STEPS
    choices[3] = [*choices[3][:-1], [sure, replace(sure, slack=0.0)]]
    assert replace(run, choices=choices).clear_steps == 4


def test_scored_and_generated_agree(model: PreTrainedModel) -> None:
    prompt = prompt_of(65)
    for retrieve, keep in ((FIER, fier.FULL), (QUEST, FASTKV)):
        run = fier.generate(model, prompt, retrieve, keep, max_tokens=STEPS)
        scored = fier.score(model, prompt, run.tokens, retrieve, keep)
        assert run.regret.max() == 0 and scored.argmax == run.tokens
        assert change(run, scored).max() == 0 and scored.choices == run.choices
        # The first token comes from prefill, which retrieval does not touch.
        dense = fastkv.score(model, prompt, run.tokens, keep)
        assert change(run, dense)[0] == 0 and change(run, dense)[1:].median() > CLEAR


def test_eos_ends_the_output(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fier.generate(llama, prompt_of(40), FIER, max_tokens=STEPS)
    monkeypatch.setattr(llama.config, "eos_token_id", run.tokens[2])
    ended = fier.generate(llama, prompt_of(40), FIER, max_tokens=STEPS, ignore_eos=False)
    assert ended.tokens == run.tokens[: run.tokens.index(run.tokens[2]) + 1]
    assert len(run.choices) == STEPS - 1 and len(ended.choices) == len(ended.tokens) - 1


@pytest.mark.parametrize("length", [60, 150])
def test_every_part_of_the_policy_shows(model: PreTrainedModel, length: int) -> None:
    """A wrong budget, group, reduction or layer must not pass unnoticed."""
    prompt = prompt_of(length, seed=length)
    run = fier.generate(model, prompt, FIER, max_tokens=8)
    for wrong in (
        {"budget": 19},
        {"budget": 21},
        {"group": 4},
        {"group": 16},
        {"pages": True},
        {"dense_below": length + 20},
        {"dense_layers": 1},
        {"dense_layers": 3},
        *(
            {"reduction": name}
            for name in ("sum", "softmax")
            if model.config.num_key_value_heads == 2
        ),
    ):
        other = fier.score(model, prompt, run.tokens, replace(FIER, **wrong))
        assert change(other, run)[1:].median() > CLEAR, wrong


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reduction": "mean"}, "softmax"),
        ({"budget": 0}, "budget"),
        ({"group": 32, "pages": True}, "budget"),
    ],
)
def test_bad_parameters(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(FIER, **wrong)
