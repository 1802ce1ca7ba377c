"""Drafted tokens that are verified compiled, under CUDA graphs. Skipped without a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.after import After
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.heads import KINDS, Kind
from reference.structkv import Struct
from support.configs import speculative
from support.drafts import Drafter, StateDrafts, some
from support.engine import running
from support.expected import FULL, Policy, Read, Speed
from support.gpu import EXACT
from support.heads import Models, assert_dense, drafted_by
from support.inside import count_graph_replays, count_retrieval_graphs
from support.parity import ask, assert_close, assert_parity, in_turn, room_for
from support.prompts import prompts_of

from vllm_kvx.cache.scheduler import AsyncPolicyScheduler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DRAFTS = 3
FIER = Retrieve(64, dense_below=0)
POLICIES: list[Policy] = [
    FULL,
    Read(FIER),
    Keep(kv_rate=0.3),
    Read(FIER, Keep(kv_rate=0.6)),
    Speed(4),
    Keep(tsp_layer=3, tsp_rate=0.4, kv_rate=0.3),
    Struct(3, struct_rate=0.4, kv_rate=0.3),
]
LENGTHS = (97, 161, 65, 150, 193, 90, 31, 128, 300, 500, 33, 250, 64, 200)
OPTIONS: dict[str, Any] = EXACT | {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
}


def test_whatever_share_is_right(tiny: Callable[..., Path]) -> None:
    """Any number of drafts stays, and answers are those of one token after the other."""
    model = tiny(head_dim=64, hidden=256)
    prompts, each = prompts_of(LENGTHS, seed=7), in_turn(POLICIES, len(LENGTHS))
    drafter_of_vllm = {"speculative_config": speculative(DRAFTS), "async_scheduling": False}
    with running(model, "full", config=room_for(POLICIES), **OPTIONS, **drafter_of_vllm) as engine:
        drafter = Drafter.of(engine, some(3, DRAFTS))
        one_by_one = ask(engine, prompts, each, max_tokens=20)
        drafter.know(one_by_one)
        counts = count_graph_replays(engine)
        assert_close(ask(engine, prompts, each, max_tokens=20), one_by_one)
        print("steps and replays of all policies:", counts)
        # Alone, so that all rows of a step are of a policy whose steps graphs can replay.
        before = dict(counts)
        assert_close(ask(engine, prompts[:1], each[:1], max_tokens=20), one_by_one[:1])
        print("steps and replays of full:", {name: counts[name] - before[name] for name in before})
        engine.assert_idle()
    assert set(drafter.accepted) == set(range(DRAFTS + 1)), drafter.accepted
    assert_parity(model, one_by_one, each, most=2)


@pytest.mark.parametrize("reads", [Retrieve(64, dense_below=0), Retrieve(48, dense_below=140)])
def test_steps_that_retrieve_replay_graphs(tiny: Callable[..., Path], reads: Retrieve) -> None:
    """Rows of a request on both sides of a length, of a group's end and of the graph's padding."""
    model = tiny(head_dim=64, hidden=256)
    policies: list[Policy] = [Read(reads), Read(reads), FULL]
    prompts, each = prompts_of(LENGTHS, seed=9), in_turn(policies, len(LENGTHS))
    options = {"speculative_config": speculative(DRAFTS), "async_scheduling": False}
    with running(model, "full", config=room_for(policies), **OPTIONS, **options) as engine:
        drafter, graphs = Drafter.of(engine, some(3, DRAFTS)), count_retrieval_graphs(engine)
        alone = ask(engine, prompts, [Read(reads)] * len(prompts), max_tokens=40)
        print("graphs of steps in which all retrieve:", graphs)
        assert graphs.get("all", 0) > 0
        assert graphs["all"] + graphs.get("mixed", 0) > graphs["steps"] // 3
        beside = ask(engine, prompts, each, max_tokens=40)
        print("beside others:", graphs)
        assert graphs.get("mixed", 0) > 0
        drafter.know(beside)
        assert_close(ask(engine, prompts, each, max_tokens=40), beside)
        engine.assert_idle()
    assert set(drafter.accepted) == set(range(DRAFTS + 1)), drafter.accepted
    assert_parity(model, [*alone, *beside], [Read(reads)] * len(prompts) + each, most=2)


def test_draft_model(tiny: Callable[..., Path]) -> None:
    """A model of the same weights drafts for `full` what stays; for the others some of it."""
    model = tiny(head_dim=64, hidden=256)
    drafter = {"method": "draft_model", "model": str(model), "num_speculative_tokens": DRAFTS}
    policies = [policy for policy in POLICIES if policy != POLICIES[3]]
    prompts, each = prompts_of(LENGTHS, seed=7), in_turn(policies, len(LENGTHS))
    with running(
        model,
        "full",
        config=room_for(policies),
        speculative_config=drafter,
        async_scheduling=False,
        **OPTIONS,
    ) as engine:
        answers = ask(engine, prompts, each, max_tokens=20)
        again = ask(engine, [[*prompt, 7, 8, 9] for prompt in prompts], each, max_tokens=8)
        engine.assert_idle()
    assert any(answer.cached for answer in again)
    assert_parity(model, [*answers, *again], each * 2, most=2)


@pytest.mark.parametrize("kind", KINDS)
def test_heads(tiny: Callable[..., Path], tmp_path: Path, kind: Kind) -> None:
    """EAGLE, EAGLE-3 and MTP: what heads draft of the whole text, beside any number that is right.

    Their first drafts replay the graphs of a verifying step, the others those of one token.
    """
    models = Models.of(tiny, tmp_path, kind, head_dim=64, hidden=256)
    policies = [*POLICIES[:4], After(Keep(kv_rate=0.3), 4)]
    prompts, each = prompts_of(LENGTHS, seed=7), in_turn(policies, len(LENGTHS))
    options = drafted_by(models.head, kind, DRAFTS, **OPTIONS)
    with running(models.served, "full", config=room_for(policies), **options) as engine:
        watched = StateDrafts(engine)
        drafter = Drafter.of(engine, some(3, DRAFTS), beside=True)
        answers = ask(engine, prompts, each, max_tokens=20)
        drafter.know(answers)
        again = ask(engine, prompts, each, max_tokens=20)
        assert_close(again, answers)
        engine.assert_idle()
    assert any(answer.cached for answer in again)
    assert set(drafter.accepted) == set(range(DRAFTS + 1)), drafter.accepted
    assert_dense(watched.found, models.dense(kind))
    assert_parity(models.model, answers, each, most=2)


@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_steps_planned_ahead(tiny: Callable[..., Path], tmp_path: Path, kind: Any) -> None:
    """Asynchronous scheduling: graphs replay before it is known which drafts stay."""
    policies = [policy for policy in POLICIES if policy != POLICIES[3]]
    if kind == "draft_model":
        model = served = tiny(head_dim=64, hidden=256)
        drafter = {"method": kind, "model": str(model), "num_speculative_tokens": DRAFTS}
        options = {"speculative_config": drafter, "async_scheduling": True, **OPTIONS}
    else:
        policies = POLICIES[:4]  # Heads draft from the states of every prompt token.
        models = Models.of(tiny, tmp_path, kind, head_dim=64, hidden=256)
        model, served = models.model, models.served
        options = drafted_by(models.head, kind, DRAFTS, **OPTIONS) | {"async_scheduling": True}
    prompts, each = prompts_of(LENGTHS, seed=7), in_turn(policies, len(LENGTHS))
    with running(served, "full", config=room_for(policies), **options) as engine:
        replays = count_graph_replays(engine)
        answers = ask(engine, prompts, each, max_tokens=20)
        alone = ask(engine, prompts[:2], each[:2], max_tokens=20)
        again = ask(engine, [[*prompt, 7, 8, 9] for prompt in prompts], each, max_tokens=8)
        assert isinstance(engine.scheduler, AsyncPolicyScheduler)
        engine.assert_idle()
    assert any(answer.cached for answer in again)
    assert replays["full"], replays
    assert_parity(model, [*answers, *alone, *again], [*each, *each[:2], *each], most=2)
