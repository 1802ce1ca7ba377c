"""Heads that draft by the model's hidden states (EAGLE, EAGLE-3, MTP), under policies.

Answers are those of the policy's dense reference, and drafts those of a dense reference of the
head: it reads its own keys and values of the whole text, whatever the policy left of the model's.

Heads of random weights are hardly ever right. So they draft, and drafts of which any number is
right take the place of theirs.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from reference.after import After
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.heads import KINDS, Head, Kind
from support import inside, options
from support.drafts import Drafter, StateDrafts, some
from support.engine import BLOCK, Answer, Engine, running
from support.expected import FULL, Policy, Read, named
from support.heads import Models, assert_dense, drafted_by
from support.nightly import nightly
from support.parity import (
    ask,
    assert_close,
    assert_parity,
    assert_parity_preempted,
    in_turn,
    room_for,
)
from support.prompts import prompts_of

from vllm_kvx.cache.kv_cache_specs import DraftAttentionSpec
from vllm_kvx.policy.spec import parse_policy

FIER = Retrieve(64)
POLICIES: list[Policy] = [
    FULL,
    Keep(kv_rate=0.2),
    Read(FIER),
    After(Keep(kv_rate=0.2), 4),
    Read(FIER, Keep(kv_rate=0.6)),
]
# Answers cross the ends of blocks, and prompts those of chunks.
LENGTHS = (97, 161, 65, 90, 150)
AT_NIGHT = (31, 128, 193)
TOKENS = 12
ROOM: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 5, "enable_prefix_caching": True}


def assert_drafts(
    engine: Engine, model: Path, head: Head, policies: Sequence[Policy], count: int
) -> None:
    """Answers and drafts are the references', whatever is accepted; blocks come back."""
    inside.poison_free_blocks(engine)
    watched = StateDrafts(engine)
    drafter = Drafter.of(engine, some(3, count), beside=True)
    lengths = LENGTHS + AT_NIGHT if options.nightly() else LENGTHS
    prompts, each = prompts_of(lengths, seed=11), in_turn(policies, len(lengths))
    answers = ask(engine, prompts, each, max_tokens=TOKENS)
    assert_parity(model, answers, each, most=1)
    drafter.know(answers)
    again = ask(engine, prompts, each, max_tokens=TOKENS)
    assert_close(again, answers)
    assert set(drafter.accepted) == set(range(count + 1)), drafter.accepted
    # As in stock vLLM, a prefix ends a block before the last one that the head finds. From 0.33 on
    # a block's hash covers the next token, and none is dropped.
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    drops = any(group.use_eagle for group in coordinator.attention_groups)
    for answer, policy in zip(again, each, strict=True):
        whole = len(answer.prompt) // BLOCK - drops
        assert answer.cached <= max(whole, 0) * BLOCK, named(policy)
    assert any(answer.cached for answer in again)
    assert_dense(watched.found, head)
    assert_thrown_out(engine, prompts, each, answers)


def assert_thrown_out(
    engine: Engine,
    prompts: Sequence[list[int]],
    policies: Sequence[Policy],
    answers: Sequence[Answer],
) -> None:
    """Preempted or aborted amid drafts, requests leave nothing, and others answer the same."""
    names = [named(policy) for policy in policies]
    expected = [answer.tokens for answer in answers]
    for steps in (3, 5, 8) if options.nightly() else (5,):
        ids = engine.submit(prompts, TOKENS, names)
        engine.step(steps)
        engine.throw_out()
        engine.step(2)
        engine.abort(ids[:1])
        engine.finish()
        assert [engine.answered[i] for i in ids[1:]] == expected[1:], steps
        engine.assert_idle()


def test_eagle3(
    tiny: Callable[..., Path], tmp_path: Path, dense_ops: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models.of(tiny, tmp_path, "eagle3", layers=4)
    config = drafted_by(models.head, "eagle3", 3, **ROOM)
    quiet = inside.watch_quiet_steps(monkeypatch)
    with running(models.served, "full", config=room_for(POLICIES), **config) as engine:
        assert_drafts(engine, models.model, models.dense("eagle3"), POLICIES, 3)
        assert quiet, "vLLM looks in every step"
        counted = engine.stats()["policies"]
        for policy in POLICIES:
            row = counted[str(parse_policy(named(policy)))]
            assert row["tokens_drafted"] > row["tokens_accepted"] > 0, named(policy)
        (group,) = (
            group
            for group in engine.scheduler.kv_cache_config.kv_cache_groups
            if isinstance(group.kv_cache_spec, DraftAttentionSpec)
        )
        assert group.layer_names == ["model.layers.4.self_attn.attn"]


@nightly
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_head(
    tiny: Callable[..., Path], tmp_path: Path, dense_ops: None, kind: Kind, count: int
) -> None:
    models = Models.of(tiny, tmp_path, kind)
    config = drafted_by(models.head, kind, count, **ROOM)
    with running(models.served, "full", config=room_for(POLICIES), **config) as engine:
        assert_drafts(engine, models.model, models.dense(kind), POLICIES, count)


@nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_that_is_too_small(
    tiny: Callable[..., Path], tmp_path: Path, dense_ops: None, kind: Kind
) -> None:
    """Requests are thrown out for lack of blocks; the head's own drafts are verified."""
    models = Models.of(tiny, tmp_path, kind, layers=4)
    small = dict(num_gpu_blocks_override=100, max_model_len=288, max_num_seqs=6)
    config = drafted_by(models.head, kind, 3, **small)
    policies = [FULL, Read(FIER), After(Keep(kv_rate=0.2), 4)]
    # Of three answers that retrieve, one may come to a near-tie at its beginning.
    assert_parity_preempted(models.model, policies, served=models.served, least=0.6, **config)


@nightly
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(
    tiny: Callable[..., Path], tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    models = Models.of(tiny, tmp_path, kind, layers=4)
    config = drafted_by(models.head, kind, 3, tensor_parallel_size=2, **ROOM)
    policies = [*POLICIES[:2], POLICIES[3]]
    prompts, each = prompts_of(LENGTHS[:3], seed=11), policies
    with running(models.served, "full", config=room_for(policies), **config) as engine:
        answers = ask(engine, prompts, each, max_tokens=6)
        engine.assert_idle()
    assert_parity(models.model, answers, each, most=0)
