"""Blocks, prefixes, preemption, compositions and counters of retrieval, on vLLM's own engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import fier
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.structkv import Struct
from support import inside
from support.engine import BLOCK, Answer, Engine, running
from support.expected import Online, Read, Speed, named
from support.parity import assert_parity
from support.prompts import prompts_of

from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.worker.decode.recall import RecallSampler

FIER = Read(Retrieve(64))
WIDE = Read(Retrieve(100))
QUEST = Retrieve(64, pages=True, reuse_layers=2)


def ask(
    engine: Engine, prompts: list[list[int]], names: Sequence[str | None], tokens: int = 4
) -> list[Answer]:
    answers = engine.generate(prompts, max_tokens=tokens, policies=names)
    engine.assert_idle()
    return answers


def continued(answer: Answer, *tokens: int) -> list[int]:
    """A next turn: the prompt, its answer and some more."""
    return [*answer.prompt, *answer.tokens, *tokens]


def test_prefixes(tiny: Callable[..., Path]) -> None:
    """Prompts are shared, also with `full`; what retrieval generated is not, in any turn."""
    model = tiny()
    shared, other = prompts_of((220, 120))
    with running(model, "fier-64", enable_prefix_caching=True) as engine:
        assert inside.upper_managers(engine) == []
        cold = ask(engine, [shared, other], [None, "full"], tokens=10)
        again = ask(engine, [shared, other], [None, None])
        # A block of either ends in generated tokens.
        turns = ask(
            engine, [continued(cold[0], 5), continued(cold[1], 5)] * 2, [None] * 2 + ["full"] * 2
        )
        # The first turn computed the blocks anew, as a prompt.
        next_turns = ask(engine, [continued(turns[0], 6), continued(turns[2], 6)], [None, "full"])
        fresh = prompts_of((96,), seed=1)[0]
        at_once = [[*fresh, *ending] for ending in prompts_of((1, 2, 33, 40), seed=2)]
        together = ask(engine, at_once, [None, "full", None, None])
        stats = engine.stats()["policies"]
    assert [a.cached for a in again] == [192, 96]
    # All of what `full` generated is shared. The third finds what the first has as a prompt.
    assert [a.cached for a in turns] == [192, 128, 224, 128]
    assert [a.cached for a in next_turns] == [224, 224]
    assert all(counters["prefix_not_shared"] == 0 for counters in stats.values())
    reads = [cold[0], *again, *turns[:2], next_turns[0], together[0], *together[2:]]
    assert_parity(model, reads, FIER)
    assert_parity(model, [cold[1], *turns[2:], next_turns[1], together[1]], Speed())


def test_preempted_equals_uninterrupted(tiny: Callable[..., Path]) -> None:
    """A pool that is too small; generated tokens run again, many at once, across groups."""
    model = tiny()
    prompts = prompts_of((100, 61, 130, 90))
    names = ["fier-64", "fier-100", "full", "fier-64"]
    with running(
        model,
        "fier-100",
        enable_prefix_caching=True,
        num_gpu_blocks_override=18,
        max_model_len=256,
    ) as engine:
        answers = ask(engine, prompts, names, tokens=46)
        assert any(p.computed > p.prompt_len + 20 for p in engine.preempted)
        # Thrown out by hand in the middle of a group, of a prompt, and right at their ends.
        for steps in (2, 36):
            ids = engine.submit(prompts[:2], 40, names[:2])
            engine.step(steps)
            engine.throw_out()
            engine.finish()
            ours = [engine.answered[i] for i in ids]
            assert ours == [a.tokens[:40] for a in answers[:2]], steps
            engine.assert_idle()
        counters = engine.stats()["policies"]["fier-64"]
    # What runs again is no decode step, and all others have more to read than the budget.
    assert counters["retrieval_steps"] > 0 and counters["dense_fallbacks"] == 0
    for answer, one in zip(answers, (FIER, WIDE, Speed(), FIER), strict=True):
        assert_parity(model, [answer], one)


@pytest.mark.parametrize("reads", [Retrieve(64, reuse_layers=3), QUEST], ids=["fier", "quest"])
def test_a_choice_for_several_layers_is_kept_when_requests_resume(
    tiny: Callable[..., Path], reads: Retrieve
) -> None:
    """They run more generated tokens again than rows can decode at once."""
    model = tiny()
    name, prompts = named(Read(reads)), prompts_of((100, 130, 90))
    options = dict(max_num_seqs=3, max_model_len=256, num_gpu_blocks_override=14)
    with running(model, name, **options) as engine:
        answers = ask(engine, prompts, [name, name, "full"], tokens=40)
        assert any(p.generated > 6 for p in engine.preempted)
        for steps in (12, 36):
            ids = engine.submit(prompts[:2], 40, [name] * 2)
            engine.step(steps)
            engine.throw_out()
            engine.finish()
            assert [engine.answered[i] for i in ids] == [a.tokens for a in answers[:2]]
            engine.assert_idle()
    assert_parity(model, answers[:2], Read(reads))
    assert_parity(model, answers[2:], Speed())


def test_resumed_beside_the_request_that_computes_its_prefix(tiny: Callable[..., Path]) -> None:
    """All but one generated token comes from the cache; its last group is filled by this step."""
    model = tiny()
    prompts = prompts_of((96, 96, 96))
    with running(model, "fier-64", enable_prefix_caching=True, max_num_batched_tokens=72) as engine:
        alone = ask(engine, prompts, [None] * 3, tokens=3)
        queue = engine.scheduler.waiting
        for prompt, answer in zip(prompts, alone, strict=True):
            engine.scheduler.reset_prefix_cache()
            (first,) = engine.submit([prompt], 3, [None])
            engine.step()
            engine.step()
            engine.throw_out()
            engine.scheduler.reset_prefix_cache()
            request = queue.pop_request()
            assert request.num_tokens == 97, "one token was generated"
            engine.submit([[*prompt, 5, 6, 7]], 3, [None])
            engine.step()
            queue.prepend_request(request)
            engine.step()
            assert request.num_computed_tokens == 97
            engine.finish()
            assert engine.answered[first] == answer.tokens
            engine.assert_idle()
    assert_parity(model, alone, FIER)


def test_aborted_at_any_time(tiny: Callable[..., Path]) -> None:
    """Every block comes back, and what the next owners read of it is theirs."""
    model = tiny()
    prompts = prompts_of((150, 64, 97))
    names = ["fier-64", "full", "fier-64"]
    with running(
        model,
        "fier-64",
        enable_prefix_caching=True,
        num_gpu_blocks_override=17,
        max_model_len=256,
    ) as engine:
        for steps in range(0, 8):
            ids = engine.submit(prompts_of((120, 70, 95), seed=steps), 20, names)
            engine.step(steps)
            engine.abort(ids)
            engine.assert_idle()
        answers = ask(engine, prompts, names, tokens=6)
    assert_parity(model, answers[::2], FIER)
    assert_parity(model, answers[1:2], Speed())


LOW, HIGH = 2, 6
LIMITS = f"min_layer={LOW},max_layer={HIGH}"
ONLINE = Online(LOW, HIGH, Struct(0, 0.6, 0.4))
# More than the budget of 64 stays of prompts this long, in every layer that has a choice.
COMPOSED: dict[str, Keep | Struct | Online] = {
    "speed-4": Keep(cutoff=4),
    "snapkv:kv_rate=0.5,kv_floor=0": Keep(kv_rate=0.5),
    "streamingllm:sinks=4,recent=90": Keep(sinks=4, recent=90),
    "speed-4+snapkv:kv_rate=0.4,kv_floor=0": Keep(cutoff=4, kv_rate=0.4),
    "fastkv:tsp_layer=3,tsp_rate=0.6,kv_rate=0.4,kv_floor=0": Keep(
        tsp_layer=3, tsp_rate=0.6, kv_rate=0.4
    ),
    "fastkv:tsp_layer=3,tsp_rate=0.5,kv_rate=1,kv_floor=0": Keep(tsp_layer=3, tsp_rate=0.5),
    "structkv:pivot=3,struct_rate=0.6,kv_rate=0.4,kv_floor=0": Struct(3, 0.6, 0.4),
    "structkv:pivot=3,struct_rate=0.7,kv_rate=0.5,kv_floor=0,granularity=block": Struct(
        3, 0.7, 0.5, block_size=BLOCK
    ),
    f"structkv:pivot=online,struct_rate=0.6,kv_rate=0.4,kv_floor=0,{LIMITS}": ONLINE,
    "": Keep(),
}


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize(
    ("retrieve", "some"),
    [
        (Retrieve(64), slice(None)),
        (Retrieve(64, group=16, pages=True, reduction="sum"), slice(0, None, 4)),
    ],
    ids=["fier", "quest"],
)
def test_composed(tiny: Callable[..., Path], retrieve: Retrieve, some: slice) -> None:
    """Every policy below retrieval, in one batch, in chunks, and thrown out in between."""
    model = tiny()
    keeps = list(COMPOSED.values())[some]
    reads = "quest-64:reduction=sum" if retrieve.pages else "fier-64"
    names = [f"{name}+{reads}" if name else reads for name in list(COMPOSED)[some]]
    prompts = prompts_of([201 + 13 * i for i in range(len(names))])
    config = {"kv_layout": names, "kv_debug": True}
    with running(
        model, reads, config=config, max_num_seqs=10, max_num_batched_tokens=400
    ) as engine:
        answers = ask(engine, prompts, names, tokens=10)
        for steps in (5, 9):
            ids = engine.submit(prompts, 10, names)
            engine.step(steps)
            engine.throw_out()
            engine.finish()
            assert [engine.answered[i] for i in ids] == [a.tokens for a in answers], steps
            engine.assert_idle()
    for answer, keep in zip(answers, keeps, strict=True):
        assert_parity(model, [answer], Read(retrieve, keep))


ROOM = 512


@pytest.mark.usefixtures("dense_ops")
def test_room_for_scores(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps leave the CUDA graphs if the entries stored have no room, not if the tokens have none;
    they are right all the same."""
    inside.room_for_scores(monkeypatch, ROOM)
    model = tiny()
    keep = COMPOSED["fastkv:tsp_layer=3,tsp_rate=0.6,kv_rate=0.4,kv_floor=0"]
    keeps = "fastkv:tsp_layer=3,tsp_rate=0.6,kv_rate=0.4,kv_floor=0+fier-64"
    prompts = prompts_of((300, 283, 290))
    config = {"kv_layout": [keeps], "kv_debug": True}
    with running(model, "fier-64", config=config, max_num_batched_tokens=2304) as engine:
        steps = inside.watch_graphs(engine)
        small = ask(engine, prompts, [keeps] * 3, tokens=8)
        first, *decodes = steps
        assert first[0] and len(decodes) == 7
        assert all(not needs and 0 < room <= ROOM for needs, room, _ in decodes)
        # Too short to retrieve by what is stored, and long enough by its tokens.
        steps.clear()
        ask(engine, prompts, [f"{keeps}:dense_below=200"] * 3)
        assert steps[1:] == [(False, 0, 0)] * 3
        steps.clear()
        large = ask(engine, prompts, [None, None, "full"], tokens=8)
        assert [batches for *_, batches in steps] == [0] + [2] * 7
        assert all(needs and room > ROOM for needs, room, _ in steps[1:])
        counters = engine.stats()["policies"]
    assert counters[str(parse_policy(keeps))]["retrieval_steps"] == 3 * 7
    assert counters["fier-64"]["retrieval_steps"] == 2 * 7
    assert_parity(model, small, Read(FIER.retrieve, keep))
    assert_parity(model, large[:2], FIER)
    assert_parity(model, large[2:], Speed())


@pytest.mark.usefixtures("dense_ops")
def test_a_choice_for_several_layers_where_scores_do_not_fit_at_once(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.room_for_scores(monkeypatch, ROOM)
    model, policy = tiny(), Read(Retrieve(64, reuse_layers=3))
    prompts = prompts_of((300, 283, 290))
    with running(model, named(policy), max_num_batched_tokens=2304) as engine:
        steps = inside.watch_graphs(engine)
        answers = ask(engine, prompts, [None] * 3, tokens=8)
        assert [batches for *_, batches in steps] == [0] + [3] * 7
    assert_parity(model, answers, policy)


@pytest.mark.parametrize("cutoff", [1, 7])
def test_groups_of_one_layer(tiny: Callable[..., Path], cutoff: int) -> None:
    """A stage of one layer makes KV groups of one, of which those of the dense layers retrieve
    nothing; beside a request that does not retrieve."""
    model = tiny()
    policy = f"speed-{cutoff}+fier-64"
    with running(model, policy, config={"kv_layout": ["fier-64"], "kv_debug": True}) as engine:
        answers = ask(engine, prompts_of((100, 140, 120)), [None, "full", "fier-64"], tokens=6)
        engine.assert_idle()
    assert_parity(model, answers[:1], Read(FIER.retrieve, Keep(cutoff=cutoff)))
    assert_parity(model, answers[1:2], Speed())
    assert_parity(model, answers[2:], FIER)


def test_counters_and_recall(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries held, scored and read of 8 layers, two of them dense; attention mass by hand."""
    model = tiny()
    config = {"kv_layout": ["speed-4"], "kv_recall_every": 1, "kv_debug": True}
    names = ["fier-64", "speed-4+fier-64", "fier-64:dense_below=104", "full"]
    prompts = prompts_of((61, 100, 100, 100))
    with running(model, "fier-64", config=config, enable_prefix_caching=True) as engine:
        ask(engine, prompts_of((40,)), ["fier-64"])
        before, idle = (engine.stats()[key] for key in ("policies", "retrieval"))
        before = before["fier-64"]
        answers = ask(engine, prompts, names, tokens=6)
        stats = engine.stats()
        # Above the cutoff, too, more than the budget is stored; some of it comes with a prefix.
        anchored = "speed-4:anchors=32,tail=40+fier-64"
        hit = [ask(engine, prompts_of((140,)), [anchored])[0] for _ in range(2)]
    assert idle["recall"] is None and idle["recall_samples"] == 0
    counters, recall = stats["policies"], stats["retrieval"]["recall"]
    assert before["dense_fallbacks"] == 3 and before["entries_scored"] == 0
    assert before["entries_read"] == before["entries_held_in_decode"] == 8 * (41 + 42 + 43)

    assert [a.cached for a in hit] == [0, 96]
    assert_parity(model, hit, Read(FIER.retrieve, Keep(cutoff=4, anchors=32, tail=40)))

    def counted(name: str, key: str) -> int:
        return counters[name][key] - (before[key] if name == "fier-64" else 0)

    def check(name: str, *, held: int, scored: int, read: int, steps: int, dense: int) -> None:
        keys = ("entries_held_in_decode", "entries_scored", "entries_read", "retrieval_steps")
        assert [counted(name, key) for key in keys] == [held, scored, read, steps], name
        assert counted(name, "dense_fallbacks") == dense, name

    early, late = [62, 63, 64, 65, 66], [101, 102, 103, 104, 105]
    check(
        "fier-64",
        held=8 * sum(early),
        scored=6 * (65 + 66),
        read=2 * sum(early) + 6 * (62 + 63 + 64 + 64 + 64),
        steps=2,
        dense=3,
    )
    # Above the cutoff: the anchor, the tail and what was generated.
    few = 4 * sum(range(3, 8))
    check(
        "speed-4+fier-64",
        held=4 * sum(late) + few,
        scored=2 * sum(late),
        read=2 * sum(late) + 2 * 5 * 64 + few,
        steps=5,
        dense=0,
    )
    check(
        "fier-64:dense_below=104",
        held=8 * sum(late),
        scored=6 * (104 + 105),
        read=8 * (101 + 102 + 103) + 2 * (104 + 105) + 6 * 2 * 64,
        steps=2,
        dense=3,
    )
    check("full", held=0, scored=0, read=0, steps=0, dense=0)

    masses: list[torch.Tensor] = []
    choose = fier.choose

    def measured(
        query: torch.Tensor, keys: torch.Tensor, retrieve: Any, scaling: float, *more: Any
    ) -> Any:
        read, *rest = choose(query, keys, retrieve, scaling, *more)
        if len(read) < len(keys):
            masses.append((query @ keys.T * scaling).softmax(dim=-1)[:, read].sum(dim=-1))
        return read, *rest

    monkeypatch.setattr(fier, "choose", measured)
    assert_parity(model, answers[:1], FIER, least=1)
    assert_parity(model, answers[1:2], Read(FIER.retrieve, Keep(cutoff=4)), least=1)
    assert_parity(model, answers[2:3], Read(replace(FIER.retrieve, dense_below=104)), least=1)
    mass = torch.cat(masses)
    assert stats["retrieval"]["recall_samples"] == len(mass) == 4 * (6 * 2 + 2 * 5 + 6 * 2)
    assert 0 < recall < 1 and recall == pytest.approx(float(mass.mean()), abs=1e-5)
    # Of each policy its own rows alone.
    parts = dict(zip(names, torch.split(mass, [4 * 6 * 2, 4 * 2 * 5, 4 * 6 * 2]), strict=False))
    for name, part in parts.items():
        assert counters[name]["recall_samples"] == len(part)
        assert counters[name]["recall"] == pytest.approx(float(part.mean()), abs=1e-5)
    assert counters["full"]["recall"] is None and counters["full"]["recall_samples"] == 0


def test_recall_is_measured_every_so_often() -> None:
    sampler = RecallSampler(3, torch.device("cpu"), 1)
    retrieves = [True, False, True, True, False, True, True, True, True]
    due = [(sampler.is_due, sampler.takes_step(each)) for each in retrieves]
    assert [taken for _, taken in due] == [i in (3, 7) for i in range(9)]
    assert all(is_due for is_due, taken in due if taken)
    never = RecallSampler(0, torch.device("cpu"), 1)
    assert not any(never.is_due or never.takes_step(True) for _ in range(5))
    assert never.recall is None
