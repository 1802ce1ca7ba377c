"""Tokens drafted behind prompts: compiled, in CUDA graphs, with an 8-bit cache."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.lookahead import Lookahead
from reference.pyramidkv import Pyramid
from support import inside
from support.engine import running
from support.expected import FULL, Policy, named
from support.gpu import COMPILED, EXACT, NEAR_TIE
from support.models import LOOKUP
from support.parity import ask, assert_parity, in_turn, room_for
from support.prompts import lookups, prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

POLICIES: list[Policy] = [
    Lookahead(Keep(kv_rate=0.2), 4),
    Lookahead(Critical(kv_rate=0.2), 16),
    Keep(kv_rate=0.2),
    Lookahead(Pyramid(kv_rate=0.6, groups=8), 5),
    FULL,
    Lookahead(Keep(kv_budget=60), 40),
]


def test_parity_compiled(tiny: Callable[..., Path]) -> None:
    """Chunks, a mixed batch, prefix hits, and decode steps that replay FULL graphs."""
    model = tiny(head_dim=64, hidden=128)
    prompts = prompts_of((33, 64, 65, 97, 129, 191, 300, 401) * 3)
    policies = [POLICIES[i % len(POLICIES)] for i in range(len(prompts))]
    options = dict(config=room_for(POLICIES), max_num_seqs=32, enable_prefix_caching=True)
    with running(model, "full", **options, **EXACT) as engine:
        counts = inside.count_graph_replays(engine)
        names = [named(policy) for policy in policies]
        answers = engine.generate(prompts, 24, names)
        again = engine.generate([[*prompt, 7, 8, 9] for prompt in prompts], 4, names)
        before = dict(counts)
        long = prompts_of((900, 700, 1200), seed=3)
        decode = engine.generate(long, 33, [named(policy) for policy in POLICIES[:3]])
        engine.assert_idle()
    assert any(answer.cached for answer in again)
    near = assert_parity(
        model,
        [*answers, *again, *decode],
        [*policies, *policies, *POLICIES[:3]],
        most=6,
        near_tie=NEAR_TIE,
    )
    full, steps = counts["full"] - before["full"], counts["steps"] - before["steps"]
    print(json.dumps({"near ties": near, "full": full, "steps": steps}))
    assert full >= 31 and full >= steps - 40, (full, steps)


@pytest.mark.parametrize("eager", [False, True])
def test_batches_of_every_size(tiny: Callable[..., Path], eager: bool) -> None:
    """One, three and more prompts in a step than graphs have rows, and a server without graphs."""
    model = tiny(head_dim=64, hidden=128)
    prompts = prompts_of((65, 97, 129, 191, 300, 64, 90, 150, 120, 170), seed=5)
    policies = in_turn(POLICIES, len(prompts))
    options = EXACT | dict(config=room_for(POLICIES), max_num_batched_tokens=2048, max_num_seqs=32)
    if eager:
        options |= dict(enforce_eager=True)
    else:
        options |= dict(compilation_config={"cudagraph_capture_sizes": [1, 2, 4]})
    with running(model, "full", **options) as engine:
        counts = inside.count_draft_replays(engine)
        answers = ask(engine, prompts, policies, max_tokens=24)
        for some in (slice(0, 1), slice(0, 3), slice(1, 3)):
            answers += ask(engine, prompts[some], policies[some], max_tokens=24)
        engine.assert_idle()
        if not eager:
            # The last pass of each prompt scores, and has no graph.
            print(dict(counts))
            assert counts[1] and counts[2] and counts[4] and counts[0]
            with inside.drafting_without_graphs(engine):
                plain = ask(engine, prompts, policies, max_tokens=24)
            same = sum(a.tokens == b.tokens for a, b in zip(answers, plain, strict=False))
            assert same >= len(prompts) - 1
    each = [*policies, policies[0], *policies[:3], *policies[1:3]]
    assert_parity(model, answers, each, most=3, near_tie=NEAR_TIE)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_lookups(kv_cache_dtype: str) -> None:
    """In bf16, many prompts a step: what plain SnapKV at the same budget keeps, and no less."""
    prompts, expected, decode = lookups(100)
    ahead, plain = (f"snapkv:kv_rate=0.1,kv_floor=0{more}" for more in (",lookahead=4", ""))
    with running(
        LOOKUP,
        ahead,
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=64,
        **(COMPILED | {"max_num_batched_tokens": 2048}),
    ) as engine:
        right, counts = {}, inside.count_draft_replays(engine)
        for name in (ahead, plain):
            answers = engine.generate(prompts, 2, [name] * len(prompts))
            pairs = zip(answers, expected, strict=True)
            right[name] = sum(decode(a.tokens) == e for a, e in pairs)
        with inside.drafting_without_graphs(engine):
            again = engine.generate(prompts, 2, [ahead] * len(prompts))
        pairs = zip(again, expected, strict=True)
        right["without graphs"] = sum(decode(a.tokens) == e for a, e in pairs)
        engine.assert_idle()
    print(json.dumps([right, counts]))
    assert sum(counts.values()) > counts[0]
    assert right[ahead] >= right["without graphs"] - 3
    assert right[ahead] >= right[plain] - 3
