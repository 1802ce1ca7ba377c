"""Drafts under asynchronous scheduling: a step is planned before the last one's drafts are known.

The host knows the most tokens that a request can have; the device knows how many there are.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.pyramidkv import Pyramid
from reference.structkv import Struct
from support import inside
from support.cpu_graphs import graphs_on_cpu
from support.engine import running, schedule_ahead
from support.expected import FULL, Policy, Read, Speed, named
from support.heads import Models, drafted_by
from support.nightly import by_day, nightly
from support.parity import (
    ask,
    assert_parity,
    assert_parity_preempted,
    assert_undisturbed,
    in_turn,
    room_for,
)
from support.prompts import prompts_of

from engine.test_draft_models import LENGTHS, assert_drafts
from vllm_kvx.cache.scheduler import AsyncPolicyScheduler
from vllm_kvx.policy.spec import parse_policy

RETAIN: list[Policy] = [FULL, Keep(kv_rate=0.4), Critical(kv_rate=0.3), Pyramid(kv_rate=0.5)]
FIER = Retrieve(48)
# The third reads a context of fewer tokens whole.
RETRIEVE: list[Policy] = [
    Read(FIER),
    Read(FIER, Keep(kv_rate=0.6)),
    Read(replace(FIER, dense_below=96)),
    FULL,
]
PROPAGATE: list[Policy] = [
    FULL,
    Speed(4),
    Keep(tsp_layer=3, tsp_rate=0.4, kv_rate=0.4),
    Struct(pivot=3, struct_rate=0.4, kv_rate=0.4),
]
ROOM: dict[str, Any] = {"max_model_len": 256, "enable_prefix_caching": True}


def ahead(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "async_scheduling"}


@pytest.fixture(autouse=True)
def planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_ahead(monkeypatch, True)


@pytest.mark.parametrize(
    "policies", [RETAIN, RETRIEVE, PROPAGATE], ids=["retain", "retrieve", "propagate"]
)
def test_a_draft_model(tiny: Callable[..., Path], dense_ops: None, policies: list[Policy]) -> None:
    """It has the same weights: what `full` drafts stays, and of the others a part."""
    model = tiny()
    drafter = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    with running(
        model, "full", config=room_for(policies), speculative_config=drafter, **ROOM
    ) as engine:
        assert isinstance(engine.scheduler, AsyncPolicyScheduler)
        assert_drafts(engine, model, policies, tokens=12)
        prompts, names = prompts_of(LENGTHS, seed=12), [named(policy) for policy in policies]
        answers = engine.generate(prompts, 8, names)
        assert_undisturbed(engine, prompts, names, answers, range(1, 7))
        counted = engine.stats()["policies"]
        others = [counted[str(parse_policy(name))] for name in names if name != "full"]
        assert counted["full"]["tokens_accepted"] > 0
        assert sum(each["tokens_accepted"] for each in others) > 0
        assert all(each["tokens_accepted"] < each["tokens_drafted"] for each in others)


@pytest.mark.parametrize("method", by_day(("eagle3", "eagle", "mtp"), {0}))
def test_heads(tiny: Callable[..., Path], tmp_path: Path, dense_ops: None, method: Any) -> None:
    models = Models.of(tiny, tmp_path, method)
    options = ahead(drafted_by(models.head, method, 3, **ROOM))
    policies = [FULL, Keep(kv_rate=0.4), *RETRIEVE[:2]]
    with running(models.served, "full", config=room_for(policies), **options) as engine:
        assert_drafts(engine, models.model, policies, tokens=12)


@nightly
def test_steps_replay_graphs(
    tiny: Callable[..., Path], dense_ops: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 1-bit keys fill amid drafts, and what follows an answer hits its blocks."""
    inside.room_in_graphs(monkeypatch, 5 * 4)
    model, lengths = tiny(), (97, 161, 65, 150, 193, 90, 31, 128)
    drafter = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    options: dict[str, Any] = {**ROOM, "max_model_len": 512, "max_num_seqs": 5}
    each = in_turn(RETRIEVE, len(lengths))
    with running(
        model, "full", config=room_for(RETRIEVE), speculative_config=drafter, **options
    ) as engine:
        inside.poison_free_blocks(engine)
        with graphs_on_cpu(engine, [4, 8, 16, 20]) as counts:
            answers = ask(engine, prompts_of(lengths, seed=11), each, max_tokens=80)
            longer = [[*one.prompt, *one.tokens, 7, 8, 9] for one in answers]
            again = ask(engine, longer, each, max_tokens=20)
        assert counts[4] and counts[20]
        engine.assert_idle()
    assert_parity(model, [*answers, *again], each * 2, most=1)


@nightly
def test_a_pool_that_is_too_small(tiny: Callable[..., Path], dense_ops: None) -> None:
    model = tiny()
    drafter = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    small = dict(num_gpu_blocks_override=66, max_model_len=288, max_num_seqs=6)
    assert_parity_preempted(model, [Read(FIER), FULL], speculative_config=drafter, **small)
