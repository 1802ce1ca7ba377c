"""SwiftKV and SelfOnly compiled, under CUDA graphs, with 8-bit caches. Skipped without a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.selfonly import Alone
from reference.swiftkv import Swift
from support.engine import running
from support.expected import FULL, Policy, Speed, named
from support.gpu import COMPILED, EXACT
from support.inside import count_graph_replays
from support.models import LOOKUP
from support.parity import ask, assert_parity, room_for
from support.prompts import EDGES, lookups, prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

POLICIES: list[Policy] = [Swift(4), Alone(4, 2), Speed(4), FULL]


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_parity_compiled(tiny: Callable[..., Path], arch: str) -> None:
    """Chunks, a mixed batch, and decode steps that replay FULL graphs."""
    model = tiny(arch, head_dim=64, hidden=128)
    prompts = prompts_of((1, *EDGES, 500, 1999))
    policies = [POLICIES[i % len(POLICIES)] for i in range(len(prompts))]
    options = dict(config=room_for(POLICIES), max_num_seqs=32, enable_prefix_caching=True)
    with running(model, named(POLICIES[0]), **options, **EXACT) as engine:
        counts = count_graph_replays(engine)
        answers = ask(engine, prompts, policies, max_tokens=24)
        again = ask(engine, [[*p, 7, 8, 9] for p in prompts], policies)
        before = dict(counts)
        decode = [
            *ask(engine, prompts_of((40,), seed=4), POLICIES[:1], max_tokens=33),
            *ask(engine, prompts_of((40,), seed=5), POLICIES[1:2], max_tokens=33),
        ]
        engine.assert_idle()
    assert_parity(model, [*answers, *again], policies * 2)
    assert_parity(model, decode, POLICIES[:2])
    steps, full = counts["steps"] - before["steps"], counts["full"] - before["full"]
    # Two prefill steps; every other one decodes and replays a FULL graph.
    assert full >= 64 and full == steps - 2, (full, steps)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_one_layer_above_answers_as_full(kv_cache_dtype: str) -> None:
    """The highest layer gets the same state either way, so its projected entries are its own."""
    prompts, expected, decode = lookups(100)
    with running(
        LOOKUP,
        "swiftkv-7",
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=64,
        **(COMPILED | {"max_num_batched_tokens": 2048}),
    ) as engine:
        answers = engine.generate(prompts, max_tokens=2)
        engine.assert_idle()
    right = [decode(a.tokens) == e for a, e in zip(answers, expected, strict=True)]
    assert sum(right) / len(right) >= 0.95
