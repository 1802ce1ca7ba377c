"""The FastKV reference against the SPEED one, against brute force, and against its definition."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedModel

from . import fastkv, speed
from .conftest import ATOL, CLEAR, KV_HEADS, LAYERS, SAFE, STEPS, change, prompt_of
from .fastkv import Keep

FULL = Keep()
FASTKV = Keep(tsp_layer=1, tsp_rate=0.5, kv_rate=0.3, window=4, kernel=5)
# Whether a query head's row sees a column: (head, row, column).
Sees = Callable[[int, int, int], bool]


def counts(result: fastkv.KeptResult) -> list[int]:
    """Entries that each layer retains, which are as many for every KV head."""
    sizes = [{len(head) for head in layer} for layer in result.retained]
    assert all(len(size) == 1 for size in sizes)
    return [size.pop() for size in sizes]


@pytest.mark.parametrize("length", [1, 9, 65])
def test_dropping_nothing_is_full_and_speed(model: PreTrainedModel, length: int) -> None:
    prompt = prompt_of(length)
    for cutoff, anchors, tail in ((None, 1, 1), (0, 1, 1), (2, 1, 1), (2, 0, 3), (LAYERS, 1, 1)):
        method = {"cutoff": cutoff, "anchors": anchors, "tail": tail}
        expected = speed.generate(model, prompt, max_tokens=STEPS, **method)
        actual = fastkv.generate(model, prompt, Keep(**method), max_tokens=STEPS)
        assert actual.tokens == expected.tokens
        assert change(actual, expected).max() < ATOL
        assert actual.slack == float("inf") and actual.propagated == list(range(length))


def brute(
    model: PreTrainedModel, prompt: list[int], generated: list[int], keep: Keep
) -> tuple[fastkv.KeptResult, int]:
    """The same from the definition: transformers' own layers, one mask per head, Python loops.

    Every layer runs every token, twice: first as prefill, for the attention that retention reads,
    then with what the generated tokens may see. Dropped rows are computed, and nobody reads them.
    Also tells at the edges of how many selections two scores were equal.
    """
    config, layers = model.config, model.model.layers
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    n, total = len(prompt), len(prompt) + len(generated) - 1
    cap, most = max(int(n * keep.kv_rate), keep.window), max(int(n * keep.tsp_rate), keep.window)
    if keep.kv_budget is not None:
        cap = keep.kv_budget
    exist = list(range(n))  # prompt positions that the layer computes
    retained, ties = [], 0

    def run(
        layer: torch.nn.Module, x: torch.Tensor, sees: Sees
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.full((1, heads, total, total), float("-inf"))
        for head in range(heads):
            for i in range(total):
                for j in range(i + 1):
                    if i == j or sees(head, i, j):
                        mask[0, head, i, j] = 0
        positions = torch.arange(total)[None]
        caught = []
        hook = layer.self_attn.register_forward_hook(lambda *call: caught.append(call[2][1][0]))
        rotary = model.model.rotary_emb(x, positions)
        y = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        hook.remove()
        return y, caught[0]

    def pooled(weights: torch.Tensor, half: int) -> list[list[float]]:
        """[query head][scored row]; half: neighbours on either side."""
        table, scored = weights.tolist(), exist[: -keep.window]
        window = exist[-keep.window :]
        result = []
        for head in range(heads):
            mass = [sum(table[head][i][j] for i in window) for j in scored]
            near = range(-half, half + 1)
            result.append(
                [max(mass[k + d] for d in near if 0 <= k + d < len(mass)) for k in range(len(mass))]
            )
        return result

    def best(weights: torch.Tensor, mine: range, count: int) -> list[int]:
        """By the sum over the heads `mine`; a plateau is cut by height."""
        nonlocal ties
        largest = len(mine) == heads and keep.tsp_reduction == "max"
        over_heads = max if largest else sum
        if largest:  # Of the window's rows, too: one row that holds their maxima.
            weights = weights.clone()
            weights[:, exist[-1]] = weights[:, exist[-keep.window :]].amax(dim=1)
            weights[:, exist[-keep.window : -1]] = 0
        scores, peaks = (
            [over_heads(column) for column in zip(*(rows[head] for head in mine), strict=True)]
            for rows in (pooled(weights, keep.kernel // 2), pooled(weights, 0))
        )
        order = sorted(range(len(scores)), key=lambda k: (-scores[k], -peaks[k], k))
        if 0 < count < len(order) and scores[order[count - 1]] == scores[order[count]]:
            ties += 1
        return sorted(exist[k] for k in order[:count]) + exist[-keep.window :]

    with torch.no_grad():
        hidden = model.model.embed_tokens(torch.tensor([prompt + generated[:-1]]))
        for index, layer in enumerate(layers):
            if index == keep.cutoff:
                exist = [j for j in exist if j < keep.anchors or j >= n - keep.tail]
            _, weights = run(layer, hidden, lambda head, i, j, exist=exist: j in exist)
            if keep.cutoff is not None and len(exist) < n:
                sets = [exist] * kv_heads
            elif keep.sinks is not None:
                mine = [j for j in exist if j < keep.sinks or j >= n - keep.recent]
                sets = [mine] * kv_heads
            elif len(exist) <= cap:
                sets = [exist] * kv_heads
            else:
                share = heads // kv_heads
                groups = [range(first, first + share) for first in range(0, heads, share)]
                sets = [best(weights, mine, cap - keep.window) for mine in groups]
            retained.append(sets)

            def sees(head: int, i: int, j: int, exist=exist, sets=sets) -> bool:
                if i < n:
                    return j in exist
                return j >= n or j in sets[head * kv_heads // heads]

            hidden, _ = run(layer, hidden, sees)
            if index == keep.tsp_layer and index + 1 < len(layers) and n > most:
                exist = best(weights, range(heads), most - keep.window)
        rows = model.lm_head(model.model.norm(hidden))[0, n - 1 :].log_softmax(dim=-1)
    propagated = exist if keep.cutoff is None else list(range(n))
    return fastkv.KeptResult(list(generated), rows, retained, propagated, float("nan")), ties


@pytest.mark.parametrize(
    "keep",
    [
        FASTKV,
        replace(FASTKV, kv_rate=0.7),  # more than is propagated
        replace(FASTKV, tsp_layer=0, kv_rate=1.0),
        replace(FASTKV, tsp_reduction="max", kv_rate=1.0),
        replace(FASTKV, tsp_layer=None, kv_rate=1.0, kv_budget=9),
        replace(FASTKV, tsp_layer=2, kernel=1, window=1),
        Keep(sinks=2, recent=5),
        Keep(sinks=2, recent=5, cutoff=2, anchors=3, tail=2),
        replace(FASTKV, tsp_layer=None, cutoff=2, anchors=2, tail=3),
    ],
)
def test_brute_force(model: PreTrainedModel, keep: Keep) -> None:
    prompt = prompt_of(30, seed=5)
    result = fastkv.generate(model, prompt, keep, max_tokens=4)
    expected, _ = brute(model, prompt, result.tokens, keep)
    assert result.slack > SAFE
    assert result.retained == expected.retained
    assert result.propagated == expected.propagated
    assert change(result, expected).max() < ATOL


def test_plateaus_occur_and_are_cut_by_height(llama: PreTrainedModel) -> None:
    """Pooling makes ties at the edge of a selection; the brute force breaks them by hand."""
    prompt, total = prompt_of(30, seed=1), 0
    for budget in range(8, 16):
        keep = replace(FASTKV, tsp_layer=None, kv_budget=budget)
        result = fastkv.generate(llama, prompt, keep, max_tokens=2)
        expected, ties = brute(llama, prompt, result.tokens, keep)
        assert result.slack > SAFE and result.retained == expected.retained
        total += ties
    assert total >= 8


@dataclass(frozen=True)
class Case:
    keep: Keep
    length: int
    stored: list[int]  # per layer
    propagated: int


@pytest.mark.parametrize(
    "case",
    [
        Case(Keep(kv_rate=0.1), 7, [7] * 4, 7),  # shorter than the window
        Case(Keep(kv_rate=0.1, tsp_layer=0, tsp_rate=0.1), 8, [8] * 4, 8),
        Case(Keep(kv_rate=0.1, tsp_layer=0, tsp_rate=0.1), 9, [8] * 4, 8),  # the window alone
        Case(Keep(kv_rate=0.29), 100, [28] * 4, 100),  # int(28.999999999999996)
        Case(Keep(kv_rate=0.2, tsp_layer=0, tsp_rate=0.5), 101, [20] * 4, 50),
        Case(Keep(kv_rate=0.5, tsp_layer=1, tsp_rate=0.2), 101, [50, 50, 20, 20], 20),
        Case(Keep(kv_rate=1.0, tsp_layer=2, tsp_rate=0.2), 101, [101, 101, 101, 20], 20),
        Case(Keep(kv_rate=0.2, tsp_layer=3, tsp_rate=0.2), 101, [20] * 4, 101),
        Case(Keep(kv_rate=0.2, tsp_layer=1, tsp_rate=1.0), 101, [20] * 4, 101),
        Case(Keep(kv_budget=33), 101, [33] * 4, 101),
        Case(Keep(kv_budget=101), 101, [101] * 4, 101),
        Case(Keep(kv_budget=33, cutoff=2, anchors=3, tail=4), 101, [33, 33, 7, 7], 101),
        Case(Keep(kv_budget=33, cutoff=2, anchors=30, tail=30), 50, [33] * 4, 50),
        Case(Keep(sinks=4, recent=20), 101, [24] * 4, 101),
        Case(Keep(sinks=4, kv_rate=0.1), 101, [10] * 4, 101),
        Case(Keep(sinks=12, kv_rate=0.1), 101, [13] * 4, 101),
        Case(Keep(sinks=4, kv_rate=0.1, kv_floor=30), 101, [30] * 4, 101),
        Case(Keep(kv_rate=0.1, kv_floor=30), 101, [30] * 4, 101),
        Case(Keep(kv_rate=0.1, kv_floor=200), 101, [101] * 4, 101),
        Case(Keep(kv_rate=0.1, kv_floor=30, tsp_layer=1, tsp_rate=0.2), 101, [30, 30, 20, 20], 20),
        Case(Keep(sinks=4, recent=20), 24, [24] * 4, 24),
        Case(Keep(sinks=4, recent=20), 3, [3] * 4, 3),
        Case(Keep(sinks=4, recent=20, cutoff=1, anchors=9, tail=2), 101, [24, 11, 11, 11], 101),
    ],
)
def test_counts(llama: PreTrainedModel, case: Case) -> None:
    prompt, keep = prompt_of(case.length), case.keep
    result = fastkv.generate(llama, prompt, keep, max_tokens=3)
    assert counts(result) == case.stored
    assert len(result.propagated) == case.propagated
    window = list(range(case.length))[-min(keep.window, case.stored[0]) :]
    full_depth = {j for j in range(case.length) if j < keep.anchors or j >= case.length - keep.tail}
    for index, layer in enumerate(result.retained):
        for head in layer:
            assert head == sorted(set(head))
            if keep.tsp_layer is not None and index > keep.tsp_layer:
                assert set(head) <= set(result.propagated)
            if keep.cutoff is not None and index >= keep.cutoff:
                assert set(head) <= full_depth
            else:
                assert keep.sinks is not None or set(window) <= set(head)
    assert set(window) <= set(result.propagated)
    # As long as nothing is dropped, it is full attention.
    if min(case.stored) == case.length:
        full = speed.generate(llama, prompt, cutoff=None, max_tokens=3)
        assert change(result, full).max() < ATOL


def test_streaming_is_a_mask(llama: PreTrainedModel) -> None:
    result = fastkv.generate(llama, prompt_of(40), Keep(sinks=4, recent=9), max_tokens=STEPS)
    assert result.retained == [[[0, 1, 2, 3, *range(31, 40)]] * KV_HEADS] * LAYERS
    assert result.slack == float("inf")
    composed = Keep(sinks=2, recent=9, cutoff=2, anchors=4, tail=3)
    result = fastkv.generate(llama, prompt_of(40), composed, max_tokens=STEPS)
    assert result.retained[:2] == [[[0, 1, *range(31, 40)]] * KV_HEADS] * 2
    assert result.retained[2:] == [[[0, 1, 2, 3, 37, 38, 39]] * KV_HEADS] * 2


def test_limits_are_each_other(llama: PreTrainedModel) -> None:
    prompt, generated = prompt_of(60), prompt_of(STEPS, seed=1)
    snapkv = fastkv.score(llama, prompt, generated, Keep(kv_rate=0.2))
    for same in (
        Keep(kv_budget=12),
        Keep(kv_rate=0.2, tsp_layer=1, tsp_rate=1.0),
        Keep(kv_rate=0.2, tsp_layer=LAYERS - 1, tsp_rate=0.1),
        Keep(kv_rate=0.2, cutoff=LAYERS),
    ):
        other = fastkv.score(llama, prompt, generated, same)
        assert change(other, snapkv).max() == 0 and other.retained == snapkv.retained
        assert other.propagated == list(range(60)) and other.slack == snapkv.slack
    # The first token comes from prefill, which retention does not touch.
    full = speed.score(llama, prompt, generated, cutoff=None)
    assert change(snapkv, full)[0] < ATOL and change(snapkv, full)[1:].min() > CLEAR
    # A budget of the window alone keeps the last tokens, whatever was attended to.
    window = fastkv.score(llama, prompt, generated, Keep(kv_budget=8))
    recent = fastkv.score(llama, prompt, generated, Keep(sinks=0, recent=8))
    assert window.retained == recent.retained and change(window, recent).max() == 0


def test_scored_and_generated_agree(model: PreTrainedModel) -> None:
    prompt = prompt_of(65)
    for keep in (FULL, FASTKV, Keep(sinks=3, recent=10), Keep(kv_budget=16, cutoff=2)):
        run = fastkv.generate(model, prompt, keep, max_tokens=STEPS)
        scored = fastkv.score(model, prompt, run.tokens, keep)
        assert run.regret.max() == 0 and scored.argmax == run.tokens
        assert change(run, scored).max() < ATOL
        assert (run.retained, run.propagated) == (scored.retained, scored.propagated)
        one = fastkv.score(model, prompt, run.tokens[:1], keep)
        assert one.tokens == run.tokens[:1] and change(one, scored)[0] == 0


@pytest.mark.parametrize("length", [40, 300])
def test_every_part_of_the_policy_shows(model: PreTrainedModel, length: int) -> None:
    """A wrong layer, rate, window, kernel or KV head must not pass unnoticed."""
    prompt = prompt_of(length, seed=length)
    keep = Keep(tsp_layer=1, tsp_rate=0.4, kv_rate=0.25)
    run = fastkv.generate(model, prompt, keep, max_tokens=12)
    assert any(len({tuple(head) for head in layer}) > 1 for layer in run.retained)
    for wrong in (
        {"tsp_layer": None},
        {"tsp_layer": 0},
        {"tsp_layer": 2},
        {"tsp_rate": 0.5},
        {"tsp_reduction": "max"},
        {"kv_rate": 1.0},
        {"kv_rate": 0.3},
        {"window": 7},
        {"kernel": 5},
        {"kernel": 1},
    ):
        other = fastkv.score(model, prompt, run.tokens, replace(keep, **wrong))
        assert change(other, run).median() > CLEAR, wrong


def test_slack_is_the_distance_to_another_choice(llama: PreTrainedModel) -> None:
    """Float64 decides as float32 does wherever the slack says so."""
    prompt = prompt_of(200, seed=3)
    run = fastkv.generate(llama, prompt, FASTKV, max_tokens=2)
    assert SAFE < run.slack < 0.5
    # Either kind of selection counts.
    for alone in (replace(FASTKV, kv_rate=1.0), replace(FASTKV, tsp_layer=None)):
        assert SAFE < fastkv.generate(llama, prompt, alone, max_tokens=1).slack < 0.5
    try:
        exact = fastkv.generate(llama.double(), prompt, FASTKV, max_tokens=2)
    finally:
        llama.float()
    assert exact.retained == run.retained and exact.propagated == run.propagated
    assert exact.slack == pytest.approx(run.slack, abs=SAFE / 2)


def test_eos_ends_the_output(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fastkv.generate(llama, prompt_of(40), FASTKV, max_tokens=STEPS)
    monkeypatch.setattr(llama.config, "eos_token_id", run.tokens[2])
    ended = fastkv.generate(llama, prompt_of(40), FASTKV, max_tokens=STEPS, ignore_eos=False)
    assert ended.tokens == run.tokens[: run.tokens.index(run.tokens[2]) + 1]
    assert len(fastkv.generate(llama, prompt_of(40), FASTKV, max_tokens=STEPS).tokens) == STEPS


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 0}, "window"),
        ({"kernel": 4}, "odd"),
        ({"kv_rate": None}, "kv_budget"),
        ({"recent": 4}, "with sinks"),
        ({"sinks": 4, "kv_budget": 9}, "recent or a rate"),
        ({"cutoff": 2, "tsp_layer": 1}, "propagates"),
        ({"tail": 0}, "tail"),
    ],
)
def test_bad_policies(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Keep(**wrong)


def test_what_a_model_or_prompt_cannot_have(llama: PreTrainedModel) -> None:
    prompt = prompt_of(40)
    for keep, message in (
        (Keep(tsp_layer=LAYERS), "4 layers"),
        (Keep(cutoff=LAYERS + 1), "4 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            fastkv.generate(llama, prompt, keep, max_tokens=1)
