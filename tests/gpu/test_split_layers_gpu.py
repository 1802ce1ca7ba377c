"""Layers that are split, compiled and beside CUDA graphs. Skipped without a GPU.

The other files here say the same of every policy: KVX_INNER_CUTS=1 runs them with split layers.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import fastkv
from world import inside
from world.engine import running
from world.expected import FULL, Policy, Speed
from world.gpu import COMPILED, EXACT, NEAR_TIE
from world.models import LOOKUP
from world.parity import ask, assert_parity, room_for
from world.prompts import EDGES, lookups, prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVX_INNER_CUTS", "1")


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
        model, "fastkv:tsp_layer=3", max_num_seqs=32, config=room_for(kinds), **EXACT
    ) as engine:
        counts = inside.count_graph_replays(engine)
        answers = ask(engine, prompts, policies, max_tokens=24)
        engine.assert_idle()
    near = assert_parity(model, answers, policies, most=2, near_tie=NEAR_TIE)
    assert counts["full"] > 0
    print(json.dumps({"near ties": near, **counts}))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("policy", ["fastkv:tsp_layer=4", "speed-4"])
def test_checkpoint_answers(kv_cache_dtype: str, policy: str) -> None:
    prompts, expected, decode = lookups(100)
    options = COMPILED | {"max_num_batched_tokens": 2048}
    with running(
        LOOKUP,
        policy,
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=64,
        **options,
    ) as engine:
        answers = engine.generate(prompts, max_tokens=2)
        right = [decode(a.tokens) == e for a, e in zip(answers, expected, strict=True)]
        engine.assert_idle()
    print(json.dumps({"kv_cache_dtype": kv_cache_dtype, policy: sum(right) / len(right)}))
    assert sum(right) >= 0.9 * len(right)
