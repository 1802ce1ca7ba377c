"""StructKV that keeps whole blocks, against the dense float32 reference, on vLLM's own engine."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from reference.fastkv import Keep
from reference.structkv import Struct
from support import inside
from support.engine import BLOCK, Engine, running, schedule_ahead
from support.expected import FULL, Below, Policy, named
from support.nightly import nightly
from support.parity import ask, assert_close, assert_parity, room_for
from support.prompts import EDGES, prompts_of

STRUCT = Struct(pivot=3)  # The defaults of `structkv:pivot=3`.
FAST = Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.1)


def blocks(pivot: int = 3, struct_rate: float = 0.2, kv_rate: float = 0.1) -> Struct:
    return Struct(pivot, struct_rate, kv_rate, block_size=BLOCK)


@nightly
@pytest.mark.usefixtures("dense_ops")
def test_pivots_and_rates(tiny: Callable[..., Path]) -> None:
    """First, middle and last pivots, rates in any relation, mixed with other policies."""
    rates = [(0.2, 0.1), (0.05, 1.0), (1.0, 0.05), (0.1, 0.5), (0.5, 0.5), (0.9, 0.4)]
    policies: list[Policy] = [
        blocks(*each) for each in ((p, *r) for p, r in product((0, 3, 7), rates))
    ]
    policies += [Struct(3), FAST, FULL, blocks(), FULL, blocks(0)]
    policies += [replace(blocks(), kv_floor=70), replace(blocks(), kv_budget=70)]
    policies += [replace(blocks(), struct_reduction="max")]
    prompts = prompts_of([60 + 37 * i % 230 for i in range(len(policies))])
    model = tiny()
    with running(model, named(blocks()), config=room_for(policies), max_num_seqs=16) as engine:
        # Long enough that blocks are appended to the re-linked ones.
        answers = ask(engine, prompts, policies, max_tokens=24)
        engine.assert_idle()
    assert_parity(model, answers, policies)


@pytest.mark.usefixtures("dense_ops")
def test_lengths_around_edges(tiny: Callable[..., Path]) -> None:
    """Lengths around blocks, chunks and windows; nothing is moved, and blocks come back."""
    model = tiny()
    lengths = sorted({*EDGES, *range(24, 76, 5), 128, 129, 167, 168, 169, 300, 643})
    prompts = prompts_of(lengths)
    policies = [blocks()] * len(prompts)
    with running(model, named(blocks())) as engine:
        answers = ask(engine, prompts, policies, max_tokens=20)
        stats = engine.stats()
        assert {group["block_size"] for group in stats["layout"]["groups"]} == {BLOCK}
        engine.assert_idle()
    assert stats["kv_bytes_moved"] == 0
    assert next(iter(stats["policies"].values()))["blocks_freed"] > 0
    assert_parity(model, answers, policies)


MIXED: list[Policy] = [
    blocks(),
    blocks(3, 0.6, 0.3),
    FULL,
    blocks(3, 1.0, 0.2),
    STRUCT,
    blocks(3, 0.5, 0.5),
    FAST,
]


@nightly
@pytest.mark.usefixtures("dense_ops")
def test_interrupted_at_any_time(tiny: Callable[..., Path]) -> None:
    """Chunks shorter than a block, thrown out by hand after k steps: as in one shot."""
    model = tiny()
    prompts = prompts_of((150, 97, 60, 201, 40, 130, 90))
    few, some = prompts[:2], MIXED[:2]
    with running(
        model, named(MIXED[0]), config=room_for(MIXED), max_num_batched_tokens=20
    ) as engine:
        chunked = ask(engine, prompts, MIXED, max_tokens=10)
        engine.assert_idle()
        undisturbed = [answer.tokens for answer in chunked[:2]]
        for steps in (3, 7, 8, 9, 12, 13, 14):
            ids = engine.submit(few, 10, [named(p) for p in some])
            engine.step(steps)
            engine.throw_out()
            engine.finish()
            assert [engine.answered[i] for i in ids] == undisturbed, steps
            engine.assert_idle()
        again = ask(engine, few, some, max_tokens=10)
        engine.assert_idle()
        inside.assert_no_centrality(engine)
    with running(
        model, named(MIXED[0]), config=room_for(MIXED), max_num_batched_tokens=4096
    ) as engine:
        one_shot = ask(engine, prompts, MIXED, max_tokens=10)
        engine.assert_idle()
    assert_parity(model, one_shot, MIXED)
    assert_close(chunked, one_shot)
    assert_close(again, one_shot[:2])


@pytest.fixture
def scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether steps are planned before the one before is done."""
    schedule_ahead(monkeypatch, request.param)
    return request.param


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize(
    "scheduling",
    [True, pytest.param(False, marks=nightly)],
    ids=["async", "sync"],
    indirect=True,
)
def test_preempted_equals_uninterrupted(tiny: Callable[..., Path], scheduling: bool) -> None:
    """A pool that is too small; with asynchronous scheduling blocks are undecided for a step."""
    model = tiny()
    policies: list[Policy] = [
        blocks(3, 0.9, 0.7),
        FULL,
        blocks(3, 1.0, 0.8),
        STRUCT,
        blocks(3, 0.8, 0.8),
        blocks(3, 0.9, 0.5),
        blocks(),
    ]
    prompts = prompts_of((180, 100, 150, 200, 190, 129, 140))
    names = [named(policy) for policy in policies]
    with running(
        model,
        names[0],
        config=room_for(policies),
        async_scheduling=scheduling,
        num_gpu_blocks_override=27,
        max_model_len=384,
        max_num_seqs=4,
        max_num_batched_tokens=40,
    ) as engine:
        assert ("Async" in type(engine.scheduler).__name__) == scheduling
        answers = ask(engine, prompts, policies, max_tokens=40)
        engine.assert_idle()
        of_blocks = {p.generated > 0 for p in engine.preempted if "block" in p.policy}
        assert of_blocks == {True, False}, engine.preempted
        ones = ask(engine, prompts, policies, max_tokens=1)
        engine.assert_idle()
        for steps in range(3, 14, 2):
            ids = engine.submit(prompts[:3], 5, names[:3])
            engine.step(steps)
            engine.abort(ids)
            engine.assert_idle()
    assert_parity(model, [*answers, *ones], [*policies, *policies])


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize("scheduling", [True], ids=["async"], indirect=True)
def test_reset_while_a_report_is_under_way(tiny: Callable[..., Path], scheduling: bool) -> None:
    """All running requests start over at once: what is said of their old blocks is void."""
    prompts = prompts_of((150, 97, 60))
    with running(tiny(), named(blocks()), async_scheduling=scheduling) as engine:
        undisturbed = [answer.tokens for answer in engine.generate(prompts, max_tokens=6)]
        for steps in range(2, 7):
            ids = engine.submit(prompts, 6)
            engine.step(steps)
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.finish()
            assert [engine.answered[i] for i in ids] == undisturbed, steps
            engine.assert_idle()


@nightly
@pytest.mark.usefixtures("dense_ops")
def test_composed_and_retained_alone(tiny: Callable[..., Path]) -> None:
    """Below a SPEED cutoff, and with every token going on; in a batch and alone."""
    model = tiny()
    retains = [blocks(3, 1.0), blocks(7, 1.0, 0.3), replace(blocks(3, 1.0, 0.05), window=33)]
    prompts = prompts_of((2, 9, 40, 72, 150, 300))
    composed = [Below(6, retains[i]) for i in (0, 2)]
    config = room_for([*composed, *retains])
    with running(model, named(composed[0]), config=config) as engine:
        below = [ask(engine, prompts, [p] * len(prompts), max_tokens=20) for p in composed]
        alone = engine.generate(prompts[4:5], 20)
        engine.assert_idle()
        answers = [ask(engine, prompts, [p] * len(prompts), max_tokens=20) for p in retains]
        engine.assert_idle()
        assert engine.stats()["kv_bytes_moved"] == 0
    for struct, group in zip(retains, answers, strict=True):
        assert_parity(model, group, struct)
    assert_close(alone, below[0][4:5])
    for policy, group in zip(composed, below, strict=True):
        assert_parity(model, group, policy, most=0)


@pytest.mark.parametrize("pivot", [4, 5])
def test_no_pivot_above_a_cutoff(tiny: Callable[..., Path], pivot: int) -> None:
    """SPEED computes too few tokens there to rank the blocks of all."""
    name = f"speed-4+structkv:pivot={pivot},struct_rate=1,granularity=block"
    with pytest.raises(ValueError, match=f"ranked at layer {pivot}.*use a pivot below 4"):
        Engine(tiny(), name)
