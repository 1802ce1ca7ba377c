"""Retention that waits for generated tokens, which read what retrieval chooses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from reference.after import After
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.pyramidkv import Pyramid
from reference.structkv import Struct
from support import inside
from support.engine import running
from support.expected import FULL, Policy, Read, named
from support.nightly import nightly
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

_TSP = Keep(tsp_layer=3, tsp_rate=0.6)
FIER = Retrieve(64)
WAITS: list[Policy] = [
    Read(FIER, After(Keep(kv_rate=0.5), 4)),
    Read(FIER, After(replace(_TSP, kv_rate=0.5), 6)),
]


def policies_of(read: Retrieve) -> list[Policy]:
    """Some wait longer than an answer takes, one for a single token, one crosses blocks."""
    return [
        Read(read, After(Keep(kv_rate=0.4), 4)),
        Read(read, After(Critical(kv_rate=0.4), 6)),
        Read(read, After(Keep(kv_budget=90), 40)),
        After(Keep(kv_rate=0.2), 4),
        Read(read, After(Pyramid(kv_rate=0.6, groups=8), 5)),
        Read(replace(read, dense_below=150), After(Keep(kv_rate=0.5, window=3, kernel=1), 1)),
        Read(read, After(replace(_TSP, kv_rate=0.4), 4)),
        Read(read, After(Struct(3, struct_rate=0.6, kv_rate=0.4), 5)),
        Read(read, After(Critical(kv_rate=0.4), 7, propagates=replace(_TSP, kv_rate=1))),
        Read(read, Keep(kv_rate=0.4)),
        Read(read),
        FULL,
    ]


@pytest.mark.parametrize(
    "read",
    [FIER, pytest.param(Retrieve(64, pages=True), marks=nightly)],
    ids=["fier", "quest"],
)
@pytest.mark.usefixtures("dense_ops")
def test_parity(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, read: Retrieve) -> None:
    """In chunks and in a batch, at the edges of blocks and chunks; then over cached prefixes.

    Queries of generated tokens are kept as CUDA graphs do it, and as steps without them do.
    """
    counts = inside.replay_waiting_steps(monkeypatch)
    # Long enough to be read in part before entries go, and after.
    lengths = [*EDGES, *(170 + 23 * i % 110 for i in range(14)), 5, 9]
    assert_parity_and_again(tiny(), lengths, policies_of(read), max_tokens=(44, 9))
    assert counts[True] > counts[False] > 0


@pytest.mark.usefixtures("dense_ops")
def test_chunks_of_one_token(tiny: Callable[..., Path]) -> None:
    """Prompts come in token by token; answers end before entries go, with that, and after it."""
    model, prompts = tiny(), prompts_of((140, 133, 164, 170))
    each = in_turn(WAITS, len(prompts))
    options = {"long_prefill_token_threshold": 1, "max_num_batched_tokens": 16}
    with running(model, "full", config=room_for(each), **options) as engine:
        for max_tokens in (3, 5, 12):
            answers = ask(engine, prompts, each, max_tokens=max_tokens)
            engine.assert_idle()
            assert_parity(model, answers, each)


@pytest.mark.usefixtures("dense_ops")
def test_preempted(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the generated tokens are in, and after them; two requests wait for theirs at once."""
    monkeypatch.setattr(admission, "GENERATED_WINDOWS", 2)
    options = {"num_gpu_blocks_override": 36, "max_model_len": 384}
    assert_parity_preempted(tiny(), [*WAITS, Read(FIER), FULL], **options)


def test_thrown_out_and_aborted_at_any_time(tiny: Callable[..., Path]) -> None:
    """In a prompt's chunks, while its retention waits and after it; all blocks come back."""
    model, prompts, names = tiny(), prompts_of((140, 131)), [named(policy) for policy in WAITS]
    config = room_for(WAITS)
    with running(model, "full", config=config, max_num_batched_tokens=80) as engine:
        undisturbed = engine.generate(prompts, max_tokens=9, policies=names)
        inside.poison_free_blocks(engine)
        assert_undisturbed(engine, prompts, names, undisturbed, range(1, 13))
    assert_parity(model, undisturbed, WAITS)


@pytest.mark.usefixtures("dense_ops")
def test_others_read_the_same_prompt(tiny: Callable[..., Path]) -> None:
    """Blocks that a request moves out of stay as they are, with what retrieval reads of them."""
    model, prompts = tiny(), prompts_of((200,) * 8)
    each: list[Policy] = [WAITS[0], Read(FIER), After(Keep(kv_rate=0.2), 2), FULL, WAITS[0]]
    names = [named(policy) for policy in each]
    options = {"enable_prefix_caching": True, "max_num_seqs": 8}
    with running(model, "full", config=room_for(each), **options) as engine:
        inside.poison_free_blocks(engine)
        for steps, prompt in enumerate(prompts, 1):
            first = engine.submit([prompt], 14, names[:1])
            engine.step(steps)
            rest = engine.submit([prompt] * 4, 14, names[1:])
            engine.finish()
            engine.assert_idle()
            answers = engine.generate([prompt] * 5, max_tokens=14, policies=names)
            assert all(answer.cached == 192 for answer in answers)
            found = [engine.answered[i] for i in (*first, *rest)]
            assert found == [answer.tokens for answer in answers], steps
            assert_parity(model, answers, each, most=1)
