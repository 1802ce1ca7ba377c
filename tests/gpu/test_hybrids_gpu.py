"""Policies on hybrids, compiled and under CUDA graphs. Skipped without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import fastkv, hybrids
from reference.criticalkv import Critical
from reference.fier import Retrieve
from reference.gemfilter import Filter
from reference.structkv import Struct
from support.engine import Answer, forget_ranks, running
from support.expected import FULL, Policy, Read, Speed
from support.gpu import COMPILED, EXACT, delta_rule_of
from support.inside import count_graph_replays
from support.parity import ATOL, ask, assert_identical, assert_parity, room_for
from support.prompts import prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

POLICIES: list[Policy] = [
    FULL,
    fastkv.Keep(kv_rate=0.2),
    Critical(kv_rate=0.3),
    Read(Retrieve(64)),
    Read(Retrieve(64), fastkv.Keep(kv_rate=0.5)),
]
# A state adds up what a chunk of tokens left in it, in another order than transformers does.
RECURRENT = ("granitemoehybrid", "lfm2")
# The delta rule has no float32 kernel on a GPU: of Qwen3-Next only bits are compared.
NAMES = ("gemma3_text", "gemma2", "gpt_oss", "granitemoehybrid", "lfm2")


@pytest.fixture(autouse=True)
def ranks_of_its_own() -> None:
    forget_ranks()


@pytest.mark.parametrize("name", NAMES)
def test_parity_compiled(tmp_path: Path, name: str) -> None:
    """In chunks beside each other, with prefix hits, and FULL graphs replayed."""
    model = hybrids.build(tmp_path / name, name)
    prompts = prompts_of((97, 33, 200, 5, 161, 64, 130, 250, 48, 500))
    policies = [POLICIES[i % len(POLICIES)] for i in range(len(prompts))]
    options = EXACT | {"block_size": 32, "max_model_len": 1024, "enable_prefix_caching": True}
    with running(model, "full", config=room_for(POLICIES), **options) as engine:
        counts = count_graph_replays(engine)
        answers = ask(engine, prompts, policies, max_tokens=16)
        assert counts["full"] > 0
        longer = [[*prompt, 7, 8, 9] for prompt in prompts]
        again = ask(engine, longer, policies, max_tokens=4)
        engine.assert_idle()
    assert any(answer.cached for answer in again)
    atol = 1e-3 if name in RECURRENT else ATOL
    # Rounding may choose another expert.
    assert_parity(model, [*answers, *again], policies * 2, most=2, atol=atol)


@pytest.mark.parametrize(
    ("name", "cut"), [("gemma3_text", 5), ("gemma2", 3), ("gpt_oss", 4), ("cohere2", 4)]
)
def test_propagation_compiled(tmp_path: Path, name: str, cut: int) -> None:
    """Layers slide above the cut; FULL graphs are replayed, and answers pass a window."""
    model = hybrids.build(tmp_path / name, name)
    kinds: list[Policy] = [
        Speed(cut),
        FULL,
        Speed(cut, anchors=40, tail=5),
        Speed(cut + 1, anchors=0),
        fastkv.Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.3),
        Struct(3, kv_rate=0.3),
        Filter(3, rate=0.2),
    ]
    prompts = prompts_of((97, 33, 200, 5, 161, 264, 330, 250, 48, 500, 1, 196, 197, 400))
    policies = [kinds[i % len(kinds)] for i in range(len(prompts))]
    options = EXACT | {"block_size": 32, "max_model_len": 1024}
    with running(model, "full", config=room_for(kinds), **options) as engine:
        counts = count_graph_replays(engine)
        answers = ask(engine, prompts, policies, max_tokens=80)
        assert counts["full"] > 0
        engine.assert_idle()
    # Rounding may choose another expert.
    assert_parity(model, answers, policies, most=2)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "qwen3_next"])
def test_full_is_stock_bit_for_bit(tmp_path: Path, name: str) -> None:
    model = hybrids.build(tmp_path / "model", name)
    prompts = prompts_of((5, 33, 130, 700, 900, 17, 64, 250))
    options: dict[str, Any] = (
        COMPILED
        | delta_rule_of(name)
        | {
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            "max_model_len": 1024,
            "dtype": "bfloat16",
        }
    )

    def answers(policy: str | None) -> list[Answer]:
        with running(model, policy, **options) as engine:
            names = [None if policy is None else "full"] * len(prompts)
            return engine.generate(prompts, max_tokens=24, policies=names)

    assert_identical(answers("snapkv:kv_rate=0.2"), answers(None))
