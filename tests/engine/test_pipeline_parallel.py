"""A pipeline of two ranks retains, retrieves, counts and answers what one rank does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.pyramidkv import Pyramid
from reference.selfonly import Alone
from support import options
from support.engine import running, schedule_ahead
from support.expected import FULL, Policy, Read, Speed, is_served, named
from support.nightly import nightly
from support.parity import ask, assert_close, assert_parity, in_turn, room_for
from support.prompts import distinct_prompts

from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.server.engines import of_pipeline

TWO_RANKS: dict[str, Any] = dict(pipeline_parallel_size=2)
KEEP, READ = Keep(kv_rate=0.3), Retrieve(64, reduction="sum")


@pytest.fixture(autouse=True)
def a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM binds one rank to a NUMA node unless told which cores to take."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def counters(engine: Any) -> dict[str, dict[str, Any]]:
    """By policy, what the engine counts, without time and bytes, which are a run's own."""
    policies = of_pipeline(engine.llm.collective_rpc("kv_policy_stats"))["policies"]
    own = ("seconds", "buckets")
    return {
        name: {field: n for field, n in totals.items() if not any(word in field for word in own)}
        for name, totals in policies.items()
    }


def test_pp2_equals_reference(tiny: Callable[..., Path]) -> None:
    """Groups of layers that one rank alone has, and a share of each stage on both."""
    model = tiny()
    policies: list[Policy] = [
        FULL,
        KEEP,
        Critical(kv_rate=0.3),
        Pyramid(kv_rate=0.3, groups=4),
        Read(READ),
        Read(READ, KEEP),
    ]
    # By day those that are counted, and the one whose groups are all on one rank.
    policies = policies if options.nightly() else [KEEP, Pyramid(kv_rate=0.3, groups=4), Read(READ)]
    policies = [policy for policy in policies if is_served(policy)]
    prompts = distinct_prompts([200, 97, 150, 130, 120, 181][: len(policies)])
    with running(model, "full", config=room_for(policies), **TWO_RANKS) as engine:
        answers = ask(engine, prompts, policies)
        engine.assert_idle()
        counted = counters(engine)
    assert_parity(model, answers, policies, most=0)
    for prompt, policy in zip(prompts, policies, strict=True):
        counts = counted[str(parse_policy(named(policy)))]
        assert counts["requests"] == 1
        assert counts["layer_tokens_computed"] == 8 * (len(prompt) + 3)
        if policy == KEEP:
            assert counts["entries_retained_by_layer"] == [int(0.3 * len(prompt))] * 8
        if policy == Read(READ):
            # The first two layers of the model read all, which the second rank has none of.
            seen = sum(len(prompt) + i for i in (1, 2, 3))
            assert counts["entries_held_in_decode"] == 8 * seen
            assert counts["entries_read"] == 2 * seen + 6 * 3 * 64


@nightly
@pytest.mark.parametrize("is_async", [False, True])
def test_pp2_with_prefix_hits_and_small_pools(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Two or three steps are under way while the next is planned, and requests start over."""
    schedule_ahead(monkeypatch, is_async)
    model = tiny()
    policies: list[Policy] = [KEEP, FULL, Read(READ), Critical(kv_rate=0.4), Read(READ, KEEP)]
    policies = [policy for policy in policies if is_served(policy)]
    lengths = (180, 150, 200, 170, 90, 129, 200, 155, 140, 97)
    prompts, each = distinct_prompts(lengths), in_turn(policies, len(lengths))
    with running(
        model,
        "full",
        config=room_for(policies),
        enable_prefix_caching=True,
        max_model_len=512,
        num_gpu_blocks_override=30,
        **TWO_RANKS,
    ) as engine:
        few = ask(engine, prompts[:3], each[:3])
        longer = [[*prompt, 7, 8, 9] for prompt in prompts[:3]]
        again = ask(engine, longer, each[:3])
        cold = ask(engine, longer, each[:3], cache_salt="cold")
        answers = ask(engine, prompts, each, max_tokens=70)
        assert engine.preempted, "the pool was meant to be too small"
        ids = engine.submit(prompts[:4], 40, [named(policy) for policy in each[:4]])
        engine.step(4)
        engine.abort(ids[:2])
        engine.assert_idle()
    assert any(answer.cached for answer in again)
    assert_close(again, cold)
    assert_parity(model, [*answers, *few, *again], [*each, *each[:3] * 2], most=2)


@nightly
@pytest.mark.parametrize("is_async", [False, True])
def test_rows_leave_between_ranks(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Of 8 layers the second rank has those from 4 on; some chunks have no row to run there."""
    schedule_ahead(monkeypatch, is_async)
    model = tiny()
    policies: list[Policy] = [
        Speed(4),
        FULL,
        Speed(4, 3, 2),
        Alone(4, 2),
        Keep(cutoff=4, sinks=4, recent=20),
        Read(READ, Keep(cutoff=4)),
        Read(READ),
    ]
    policies = [policy for policy in policies if is_served(policy)]
    lengths = (230, 150, 200, 170, 90, 129, 1, 33, 97)
    prompts, each = distinct_prompts(lengths), in_turn(policies, len(lengths))
    with running(
        model,
        "full",
        config=room_for(policies),
        enable_prefix_caching=True,
        max_model_len=512,
        num_gpu_blocks_override=40,
        **TWO_RANKS,
    ) as engine:
        few = ask(engine, prompts[:3], each[:3])
        longer = [[*prompt, 7, 8, 9] for prompt in prompts[:3]]
        again = ask(engine, longer, each[:3])
        answers = ask(engine, prompts, each, max_tokens=40)
        assert engine.preempted, "the pool was meant to be too small"
        engine.assert_idle()
        counted = counters(engine)
    assert any(answer.cached for answer in again)
    skipped = counted[str(parse_policy(named(Speed(4))))]["layer_tokens_skipped"]
    assert skipped >= 4 * (230 - 2)
    assert_parity(model, [*answers, *few, *again], [*each, *each[:3] * 2], most=2)
