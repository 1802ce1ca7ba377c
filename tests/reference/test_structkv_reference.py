"""The StructKV reference against brute force, against its siblings, and against its definition."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedModel

from . import fastkv, speed, structkv, structsnap
from .conftest import ATOL, CLEAR, LAYERS, SAFE, STEPS, change, paper, pooled, prompt_of
from .fastkv import Keep
from .structkv import Struct

FULL = paper(pivot=0, struct_rate=1, kv_rate=1)
TOKENS = paper(pivot=1, struct_rate=0.5, kv_rate=0.3, window=4)
BLOCKS = replace(TOKENS, block_size=4)


def rows_of(result: fastkv.KeptResult) -> list[list[int]]:
    """Prompt positions that each layer retains, which are the same for every KV head."""
    assert all(head == layer[0] for layer in result.retained for head in layer)
    return [layer[0] for layer in result.retained]


@pytest.mark.parametrize("length", [1, 9, 65])
def test_dropping_nothing_is_full(model: PreTrainedModel, length: int) -> None:
    prompt = prompt_of(length)
    expected = speed.generate(model, prompt, cutoff=None, max_tokens=STEPS)
    for struct in (FULL, replace(FULL, pivot=2, block_size=4), replace(FULL, pivot=3, window=70)):
        actual = structkv.generate(model, prompt, struct, max_tokens=STEPS)
        assert actual.tokens == expected.tokens
        assert change(actual, expected).max() < ATOL
        assert actual.slack == float("inf") and actual.propagated == list(range(length))
        assert rows_of(actual) == [list(range(length))] * LAYERS


def brute(
    model: PreTrainedModel, prompt: list[int], generated: list[int], struct: Struct
) -> fastkv.KeptResult:
    """The same from the definition: transformers' own layers, masks and Python loops.

    The prompt runs first, for the attention that everything reads; then it runs again with the
    generated tokens, who see what is retained. Dropped rows are computed, and nobody reads them.
    """
    config, layers = model.config, model.model.layers
    n, total, size = len(prompt), len(prompt) + len(generated) - 1, struct.block_size
    window = list(range(n))[-struct.window :]

    def run(layer: torch.nn.Module, x: torch.Tensor, sees) -> tuple[torch.Tensor, list]:  # type: ignore[no-untyped-def]
        count = x.shape[1]
        mask = torch.full((1, 1, count, count), float("-inf"))
        for i in range(count):
            for j in range(i + 1):
                if i == j or sees(i, j):
                    mask[0, 0, i, j] = 0
        positions = torch.arange(count)[None]
        caught = []
        hook = layer.self_attn.register_forward_hook(lambda *call: caught.append(call[2][1][0]))
        rotary = model.model.rotary_emb(x, positions)
        y = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        hook.remove()
        return y, caught[0].tolist()

    def best(scores: dict[int, float], count: int, *peaks: dict[int, float]) -> list[int]:
        """By `peaks` among equals."""
        keys = [scores, *peaks]
        return sorted(sorted(scores, key=lambda k: (*(-by[k] for by in keys), k))[:count])

    def whole_blocks(exist: list[int], centrality: dict[int, float]) -> list[int]:
        parts = [exist[k : k + size] for k in range(0, len(exist), size)]
        must = [b for b, part in enumerate(parts) if set(part) & set(window)]
        scores = {
            b: sum(centrality.get(j, 0) for j in part)
            for b, part in enumerate(parts)
            if b not in must
        }
        most = max(math.ceil(n * struct.kv_rate / size), len(must))
        return [j for b in sorted(best(scores, most - len(must)) + must) for j in parts[b]]

    with torch.no_grad():
        exist, exists = list(range(n)), []  # prompt positions that the layer computes
        local: list[list[dict[int, float]]] = []
        centrality = dict.fromkeys(range(n - len(window)), 0.0)
        hidden = model.model.embed_tokens(torch.tensor([prompt]))
        for index, layer in enumerate(layers):
            hidden, table = run(layer, hidden, lambda i, j, exist=exist: j in exist)
            exists.append(exist)
            scored = [j for j in exist if j not in window]
            heads = range(config.num_attention_heads)
            attends, widths = torch.tensor(table), (struct.kernel, 1)
            local.append([pooled(attends, heads, exist, struct.window, width) for width in widths])
            reduce = max if struct.struct_reduction == "max" else sum
            now = {j: reduce([table[h][i][j] for h in heads for i in window]) for j in scored}
            if index <= struct.pivot:
                centrality = {j: struct.decay * centrality[j] + now[j] for j in scored}
            most = max(int(n * struct.struct_rate), struct.window)
            if index == struct.pivot < len(layers) - 1 and n > most:
                exist = best(centrality, most - len(window)) + window

        cap = max(int(n * struct.kv_rate), struct.window)
        kept = []
        for mine, (scores, peaks) in zip(exists, local, strict=True):
            if size:
                kept.append(whole_blocks(mine, centrality))
            elif len(mine) <= cap:
                kept.append(mine)
            else:
                kept.append(best(scores, cap - len(window), peaks) + window)

        hidden = model.model.embed_tokens(torch.tensor([prompt + generated[:-1]]))
        assert hidden.shape[1] == total
        for layer, mine, stored in zip(layers, exists, kept, strict=True):

            def sees(i: int, j: int, mine=mine, stored=stored) -> bool:
                return j in mine if i < n else j >= n or j in stored

            hidden, _ = run(layer, hidden, sees)
        rows = model.lm_head(model.model.norm(hidden))[0, n - 1 :].log_softmax(dim=-1)
    retained = [[mine] * config.num_key_value_heads for mine in kept]
    return fastkv.KeptResult(list(generated), rows, retained, exist, float("nan"))


@pytest.mark.parametrize(
    "struct",
    [
        TOKENS,
        replace(TOKENS, kv_rate=0.7),  # more than goes on
        replace(TOKENS, pivot=0, kv_rate=1.0),
        replace(TOKENS, pivot=2, decay=0.5, window=1),
        replace(TOKENS, struct_rate=1.0),
        replace(TOKENS, pivot=3),
        replace(TOKENS, pivot=2, struct_reduction="max"),
        replace(TOKENS, kernel=5),
        replace(TOKENS, kernel=7, pivot=2, kv_rate=0.4),
        replace(TOKENS, kernel=31, kv_rate=0.2, struct_reduction="max"),  # wider than all rows
        replace(BLOCKS, struct_reduction="max"),
        BLOCKS,
        replace(BLOCKS, pivot=2, block_size=5, window=7, kv_rate=0.5, decay=0.3),
        replace(BLOCKS, struct_rate=1.0, block_size=3),
        replace(BLOCKS, struct_rate=0.8, block_size=2, kv_rate=0.4),  # many blocks to choose from
        replace(BLOCKS, pivot=3, block_size=1),
        replace(BLOCKS, struct_rate=0.7, block_size=8, kv_rate=0.6),
    ],
)
def test_brute_force(model: PreTrainedModel, struct: Struct) -> None:
    prompt = prompt_of(30, seed=5)
    result = structkv.generate(model, prompt, struct, max_tokens=4)
    expected = brute(model, prompt, result.tokens, struct)
    assert result.slack > SAFE
    assert result.propagated == expected.propagated
    assert result.retained == expected.retained
    assert change(result, expected).max() < ATOL


@dataclass(frozen=True)
class Case:
    struct: Struct
    length: int
    stored: list[int]  # by layer
    propagated: int


@pytest.mark.parametrize(
    "case",
    [
        Case(paper(1), 7, [7] * 4, 7),  # shorter than the window
        Case(paper(1), 8, [8] * 4, 8),
        Case(paper(1), 9, [8] * 4, 8),  # the window alone
        Case(paper(1), 101, [10] * 4, 20),
        Case(paper(0, kv_rate=0.29), 100, [28, 20, 20, 20], 20),  # int(28.999999999999996)
        Case(paper(1, struct_rate=0.5, kv_rate=0.2), 101, [20] * 4, 50),
        Case(paper(1, kv_rate=0.5), 101, [50, 50, 20, 20], 20),
        Case(paper(2, kv_rate=1.0), 101, [101, 101, 101, 20], 20),
        Case(paper(3), 101, [10] * 4, 101),
        Case(paper(1, struct_rate=1.0), 101, [10] * 4, 101),
        # Blocks of 8 or 32: 100 tokens end 4 into block 12, or into block 3.
        Case(paper(1, kv_budget=33), 101, [33, 33, 20, 20], 20),
        Case(paper(1, kv_floor=15), 101, [15] * 4, 20),
        Case(paper(1, kv_floor=15, most_kept=0.12), 101, [12] * 4, 20),
        Case(paper(1, kv_floor=17, block_size=8), 100, [20, 20, 20, 20], 20),
        Case(paper(1, kv_budget=24, block_size=8), 100, [20, 20, 20, 20], 20),
        Case(paper(1, kv_budget=25, block_size=8), 100, [28, 28, 20, 20], 20),
        Case(paper(1, kv_rate=1.0, block_size=8), 100, [100, 100, 20, 20], 20),
        Case(paper(1, block_size=8), 100, [12, 12, 12, 12], 20),  # the window's two
        Case(paper(1, kv_rate=0.2, block_size=8), 100, [20, 20, 20, 20], 20),
        Case(paper(1, kv_rate=0.3, block_size=8), 100, [28, 28, 20, 20], 20),
        Case(paper(1, struct_rate=1.0, kv_rate=0.3, block_size=8), 100, [28] * 4, 100),
        Case(paper(3, kv_rate=0.3, block_size=8), 100, [28] * 4, 100),
        Case(paper(1, struct_rate=0.5, block_size=32), 100, [36, 36, 18, 18], 50),
        Case(paper(1, struct_rate=0.8, block_size=32), 100, [36, 36, 16, 16], 80),
        Case(paper(1, window=4, block_size=32), 100, [4, 4, 20, 20], 20),
        Case(paper(1, window=5, block_size=32), 100, [36, 36, 20, 20], 20),
        Case(paper(1, block_size=8), 9, [9, 9, 8, 8], 8),
        Case(paper(1, block_size=8), 1, [1] * 4, 1),
    ],
)
def test_counts(llama: PreTrainedModel, case: Case) -> None:
    prompt, struct, length = prompt_of(case.length), case.struct, case.length
    result = structkv.generate(llama, prompt, struct, max_tokens=3)
    rows = rows_of(result)
    assert [len(layer) for layer in rows] == case.stored
    assert len(result.propagated) == case.propagated
    window = list(range(length))[-struct.window :]
    for index, layer in enumerate(rows):
        computed = result.propagated if index > struct.pivot else list(range(length))
        assert layer == sorted(set(layer)) and set(window) <= set(layer) <= set(computed)
        if struct.block_size is not None:
            assert layer == rows[0 if index <= struct.pivot else -1]
            blocks = {computed.index(j) // struct.block_size for j in layer}
            whole = [j for k, j in enumerate(computed) if k // struct.block_size in blocks]
            assert layer == whole
    assert set(window) <= set(result.propagated)
    # As long as nothing is dropped, it is full attention.
    if min(case.stored) == length:
        full = speed.generate(llama, prompt, cutoff=None, max_tokens=3)
        assert change(result, full).max() < ATOL


def test_limits_are_each_other(llama: PreTrainedModel) -> None:
    prompt, generated = prompt_of(60), prompt_of(STEPS, seed=1)
    retains = structkv.score(llama, prompt, generated, paper(0, struct_rate=1, kv_rate=0.2))
    for same in (
        paper(2, struct_rate=1, kv_rate=0.2, decay=0.5),
        paper(LAYERS - 1, struct_rate=0.2, kv_rate=0.2),
    ):
        other = structkv.score(llama, prompt, generated, same)
        assert change(other, retains).max() == 0 and other.retained == retains.retained
        assert other.propagated == list(range(60)) and other.slack == retains.slack
    # The first token comes from prefill, which retention does not touch.
    full = speed.score(llama, prompt, generated, cutoff=None)
    assert change(retains, full)[0] < ATOL and change(retains, full)[1:].min() > CLEAR
    # FastKV selects by one layer too, if nothing is pooled.
    for pivot, same in ((0, True), (1, False)):
        mine = structkv.score(llama, prompt, generated, paper(pivot, kv_rate=1))
        keep = Keep(tsp_layer=pivot, tsp_rate=0.2, kernel=1)
        theirs = fastkv.score(llama, prompt, generated, keep)
        assert (mine.propagated == theirs.propagated) == same
        assert (change(mine, theirs).max() < ATOL) == same
    # A budget of the window alone keeps the last tokens, whatever was attended to.
    window = structkv.score(llama, prompt, generated, paper(1, struct_rate=0.01, kv_rate=0.01))
    assert window.propagated == list(range(52, 60))
    assert rows_of(window) == [list(range(52, 60))] * LAYERS
    assert window.slack == float("inf")
    # One block holds all.
    propagates = structkv.score(llama, prompt, generated, paper(1, kv_rate=1))
    blocks = structkv.score(llama, prompt, generated, paper(1, block_size=64))
    assert blocks.retained == propagates.retained and change(blocks, propagates).max() == 0


@pytest.mark.parametrize(
    "struct",
    [
        Struct(1, struct_rate=0.5, kv_rate=0.3, window=4, kernel=1),
        Struct(2, struct_rate=0.3, kv_rate=0.5, decay=0.5),
        Struct(LAYERS - 1, kv_rate=0.2, kernel=3),
        Struct(0, struct_rate=1, kv_rate=0.2, window=1, kernel=1),
    ],
)
def test_own_sets(llama: PreTrainedModel, struct: Struct) -> None:
    """Each KV head for itself is SnapKV's retention, which has its own proof."""
    prompt, generated = prompt_of(60), prompt_of(STEPS, seed=1)
    mine = structkv.score(llama, prompt, generated, replace(struct, heads="own"))
    snap = structsnap.StructSnap(
        struct.pivot,
        struct.struct_rate,
        struct.decay,
        struct.window,
        kv_rate=struct.kv_rate,
        kernel=struct.kernel,
    )
    theirs = structsnap.score(llama, prompt, generated, snap)
    assert mine.slack > SAFE
    assert mine.retained == theirs.retained and mine.propagated == theirs.propagated
    assert change(mine, theirs).max() == 0
    together = structkv.score(llama, prompt, generated, struct)
    assert together.propagated == mine.propagated and together.retained != mine.retained


def test_a_decay_of_1_is_a_sum_and_a_tiny_one_the_last_layer(llama: PreTrainedModel) -> None:
    prompt, pivot = prompt_of(80, seed=2), 2
    hidden, positions = llama.model.embed_tokens(torch.tensor(prompt)), torch.arange(80)
    layers = []
    with torch.no_grad():
        for layer in llama.model.layers[: pivot + 1]:
            hidden, _, _, probs = fastkv.block(llama, layer, hidden, positions, None)
            layers.append(probs[:, -8:, :-8].double().sum(dim=(0, 1)))
    for decay, centrality in (
        (1.0, layers[0] + layers[1] + layers[2]),
        (0.5, layers[0] / 4 + layers[1] / 2 + layers[2]),
        (1e-9, layers[2]),
    ):
        result = structkv.generate(llama, prompt, paper(pivot, decay=decay), max_tokens=1)
        assert result.slack > SAFE
        expected = centrality.argsort(descending=True)[:8].sort().values.tolist()
        assert result.propagated == [*expected, *range(72, 80)]


def test_scored_and_generated_agree(model: PreTrainedModel) -> None:
    prompt = prompt_of(65)
    for struct in (FULL, TOKENS, BLOCKS):
        run = structkv.generate(model, prompt, struct, max_tokens=STEPS)
        scored = structkv.score(model, prompt, run.tokens, struct)
        assert run.regret.max() == 0 and scored.argmax == run.tokens
        assert change(run, scored).max() < ATOL
        assert (run.retained, run.propagated) == (scored.retained, scored.propagated)
        one = structkv.score(model, prompt, run.tokens[:1], struct)
        assert one.tokens == run.tokens[:1] and change(one, scored)[0] == 0


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("length", [40, 300])
def test_every_part_of_the_policy_shows(
    model: PreTrainedModel, length: int, size: int | None
) -> None:
    """A wrong pivot, rate, window, decay or granularity must not pass unnoticed."""
    prompt = prompt_of(length, seed=length)
    struct = paper(1, struct_rate=0.4, kv_rate=0.25, block_size=size)
    run = structkv.generate(model, prompt, struct, max_tokens=12)
    for wrong in (
        {"pivot": 0},
        {"pivot": 2},
        {"struct_rate": 0.5},
        {"struct_rate": 1.0},
        {"kv_rate": 1.0},
        {"kv_rate": 0.4},
        {"window": 5},
        {"decay": 0.1},
        {"struct_reduction": "max"},
        {"block_size": 5 if size else 1},
        {"block_size": None if size else 8},
        *([] if size else [{"heads": "own"}, {"kernel": 7}]),
    ):
        other = structkv.score(model, prompt, run.tokens, replace(struct, **wrong))
        assert change(other, run).median() > CLEAR, wrong


def test_slack_is_the_distance_to_another_choice(llama: PreTrainedModel) -> None:
    """Float64 decides as float32 does wherever the slack says so."""
    prompt = prompt_of(200, seed=3)
    for struct in (TOKENS, BLOCKS):
        run = structkv.generate(llama, prompt, struct, max_tokens=2)
        assert SAFE < run.slack < 0.5
        # Either kind of selection counts.
        for alone in (replace(struct, kv_rate=1.0), replace(struct, struct_rate=1.0)):
            assert SAFE < structkv.generate(llama, prompt, alone, max_tokens=1).slack < 0.5
        try:
            exact = structkv.generate(llama.double(), prompt, struct, max_tokens=2)
        finally:
            llama.float()
        assert exact.retained == run.retained and exact.propagated == run.propagated
        assert exact.slack == pytest.approx(run.slack, abs=SAFE / 2)


def test_eos_ends_the_output(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run = structkv.generate(llama, prompt_of(40), TOKENS, max_tokens=STEPS)
    monkeypatch.setattr(llama.config, "eos_token_id", run.tokens[2])
    ended = structkv.generate(llama, prompt_of(40), TOKENS, max_tokens=STEPS, ignore_eos=False)
    assert ended.tokens == run.tokens[: run.tokens.index(run.tokens[2]) + 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 0}, "window"),
        ({"block_size": 0}, "block_size"),
        ({"struct_rate": 0}, "rates"),
        ({"kv_rate": 1.5}, "rates"),
        ({"decay": 0}, "decay"),
        ({"heads": "each"}, "heads"),
        ({"kernel": 4}, "kernel"),
    ],
)
def test_bad_policies(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paper(1, **wrong)


def test_a_pivot_that_the_model_has_not(llama: PreTrainedModel) -> None:
    for pivot in (-1, LAYERS):
        with pytest.raises(ValueError, match="4 layers"):
            structkv.generate(llama, prompt_of(40), paper(pivot), max_tokens=1)
