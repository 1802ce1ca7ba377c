"""Retention that waits for generated tokens, above which others went on when the prompt was in."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from reference.after import After
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.pyramidkv import Pyramid
from reference.structkv import Struct
from support import inside
from support.engine import BLOCK, running
from support.expected import FULL, Policy, named
from support.parity import (
    ask,
    assert_parity,
    assert_parity_and_again,
    assert_parity_preempted,
    assert_undisturbed,
    in_turn,
    room_for,
)
from support.prompts import EDGES, prompts_of

from vllm_kvx.cache import admission

_TSP = Keep(tsp_layer=3, tsp_rate=0.3)
_GOES_ON = Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=1)
FAST = After(replace(_TSP, kv_rate=0.2), 4)
# Above a cut that is split and above one that is not, with retention's rate above and below
# propagation's, as parameters of one method and as another's.
POLICIES: list[Policy] = [
    FAST,
    After(Keep(kv_rate=0.1), 6, propagates=_GOES_ON),
    After(Keep(tsp_layer=0, tsp_rate=0.5, kv_rate=0.1, window=3, kernel=1), 1),
    After(Struct(3, struct_rate=0.4, kv_rate=0.2), 4),
    replace(_TSP, kv_rate=0.2),
    After(replace(_TSP, kv_rate=0.4, tsp_reduction="max"), 5),
    After(replace(_TSP, kv_budget=40), 40),
    After(Keep(kv_rate=0.2), 3, propagates=Struct(5, kv_rate=1)),
    After(Critical(kv_rate=0.2), 7, propagates=_GOES_ON),
    After(Struct(5, struct_rate=0.3, kv_rate=0.2, heads="own", score="critical"), 2),
    After(Pyramid(kv_rate=0.3, groups=4), 5, propagates=_GOES_ON),
    After(replace(_TSP, tsp_rate=1.0, kv_rate=0.2), 4),
    # Nothing goes on.
    After(replace(_TSP, tsp_floor=400, kv_rate=0.2), 4),
    FULL,
]


@pytest.mark.usefixtures("dense_ops")
def test_parity(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks and in a batch, at the edges of blocks and chunks; then over cached prefixes.

    Queries of generated tokens are kept as CUDA graphs do it, and as steps without them do.
    """
    counts = inside.replay_waiting_steps(monkeypatch)
    lengths = [*EDGES, *(100 + 23 * i % 110 for i in range(len(POLICIES))), 5, 9]
    assert_parity_and_again(tiny(), lengths, POLICIES, max_tokens=(44, 9))
    assert counts[True] > counts[False] > 0


@pytest.mark.usefixtures("dense_ops")
def test_chunks_of_one_token(tiny: Callable[..., Path]) -> None:
    """The window's queries come in one by one, below the cut; and answers end before and after."""
    model, prompts = tiny(), prompts_of((40, 33, 64, 70, 9, 96))
    each = in_turn(POLICIES[:6], len(prompts))
    options = {"long_prefill_token_threshold": 1, "max_num_batched_tokens": 16}
    with running(model, "full", config=room_for(each), **options) as engine:
        for max_tokens in (3, 12):
            answers = ask(engine, prompts, each, max_tokens=max_tokens)
            engine.assert_idle()
            assert_parity(model, answers, each)


@pytest.mark.usefixtures("dense_ops")
def test_preempted(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the generated tokens are in, and after them; two requests wait for theirs at once."""
    monkeypatch.setattr(admission, "GENERATED_WINDOWS", 2)
    options = {"num_gpu_blocks_override": 28, "max_model_len": 384}
    assert_parity_preempted(tiny(), [POLICIES[i] for i in (0, 1, 3, 4)], **options)


def test_thrown_out_and_aborted_at_any_time(tiny: Callable[..., Path]) -> None:
    """In a prompt's chunks, while its retention waits and after it; all blocks come back."""
    model, each = tiny(), [FAST, POLICIES[3]]
    prompts = prompts_of((70, 61))
    names = [named(policy) for policy in each]
    config = room_for(each)
    with running(model, "full", config=config, max_num_batched_tokens=40) as engine:
        undisturbed = engine.generate(prompts, max_tokens=9, policies=names)
        assert_undisturbed(engine, prompts, names, undisturbed, range(1, 13))
    assert_parity(model, undisturbed, each)


def test_what_is_held_meanwhile(tiny: Callable[..., Path]) -> None:
    """All of the prompt until then, above the cut what goes on; as much as without it from then on.

    The blocks that go are free one step later.
    """
    keep, length, waits = Keep(tsp_layer=3, tsp_rate=0.5, kv_rate=0.1), 640, 8
    policy = After(keep, waits)
    (prompt,) = prompts_of((length,))
    lower, upper, stays = length, length // 2, length // 10
    with running(tiny(), named(policy), max_num_batched_tokens=320) as engine:
        usable = engine.pool.get_num_free_blocks()
        engine.submit([prompt], 24)
        engine.step()
        (request,) = engine.scheduler.requests.values()
        while engine.scheduler.has_unfinished_requests():
            done = request.num_computed_tokens
            held = engine.held_blocks(request.request_id)
            above = done - length
            if above < 0:
                expected = [done, 0]
            elif above <= waits:
                expected = [lower + above, upper + above]
            else:
                expected = [stays + above, stays + above]
            assert held == [-(-entries // BLOCK) for entries in expected], done
            assert engine.pool.get_num_free_blocks() == usable - sum(held)
            engine.step()
        engine.assert_idle()
        (found,) = [each for each in engine.stats()["policies"].values() if each["requests"]]
    entries = 4 * (lower + upper) + 8 * waits
    assert found["entries_retained"] == 8 * (stays + waits)
    assert found["entries_dropped"] == entries - found["entries_retained"]
