"""Layers that are split, compiled and beside CUDA graphs. Skipped without a GPU.

They are split in the other files here, too, whose policies have one.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import fastkv
from support import inside
from support.engine import running
from support.expected import FULL, Policy, Speed
from support.gpu import COMPILED, EXACT, NEAR_TIE
from support.models import LOOKUP
from support.parity import ask, assert_parity, room_for
from support.prompts import EDGES, lookups, prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_parity_compiled(tiny: Callable[..., Path]) -> None:
    model = tiny(head_dim=64, hidden=128)
    kinds: list[Policy] = [
        fastkv.Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.1),
        Speed(4),
        FULL,
        Speed(6, 3, 2),
        fastkv.Keep(tsp_layer=3, tsp_rate=0.6, kv_rate=1.0),
    ]
    prompts = prompts_of((*EDGES, 300, 500, 700, 1999, 2000, *[1200] * len(kinds)))
    policies = [kinds[i % len(kinds)] for i in range(len(prompts))]
    with running(
        model, "fastkv:kv_floor=0,tsp_layer=3", max_num_seqs=32, config=room_for(kinds), **EXACT
    ) as engine:
        assert inside.runs_compiled_ranges(engine)
        counts = inside.count_graph_replays(engine)
        answers = ask(engine, prompts, policies, max_tokens=24)
        engine.assert_idle()
    near = assert_parity(model, answers, policies, most=2, near_tie=NEAR_TIE)
    assert counts["full"] > 0
    print(json.dumps({"near ties": near, **counts}))


def test_more_sequences_than_attention_plans_ahead() -> None:
    """Prompts come in at once, each of which is two sequences of the layer that is split."""
    prompts, expected, decode = lookups(32)
    options = COMPILED | {"max_num_batched_tokens": 32768}
    with running(
        LOOKUP,
        "speed-4",
        dtype="bfloat16",
        max_num_seqs=24,
        compilation_config={"max_cudagraph_capture_size": 24},
        **options,
    ) as engine:
        answers = engine.generate(prompts, max_tokens=2)
        engine.assert_idle()
    right = [decode(a.tokens) == e for a, e in zip(answers, expected, strict=True)]
    assert sum(right) >= 0.9 * len(right)
