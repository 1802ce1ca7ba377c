"""Experts compiled, under CUDA graphs, on the engine's default path. Skipped without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import fastkv
from reference.fier import Retrieve
from reference.zoo import build
from support.engine import Answer, forget_ranks, running
from support.expected import FULL, Policy, Read, Speed
from support.gpu import COMPILED, EXACT
from support.inside import count_graph_replays, runs_compiled_ranges
from support.parity import ask, assert_identical, assert_parity, room_for
from support.prompts import prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def ranks_of_its_own() -> None:
    forget_ranks()


POLICIES: list[Policy] = [
    FULL,
    Speed(4),
    fastkv.Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=0.2),
    fastkv.Keep(kv_rate=0.2),
    Read(Retrieve(64)),
]


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "mixtral", "granite", "cohere"])
def test_parity_compiled(tmp_path: Path, name: str) -> None:
    """By the stock decoder's own compiled pieces, but for Cohere, of which two tensors live."""
    model = build(tmp_path / name, name, head_dim=64, hidden_size=256)
    prompts = prompts_of((97, 33, 200, 5, 161, 64, 130, 250, 48, 500))
    policies = [POLICIES[i % len(POLICIES)] for i in range(len(prompts))]
    options = EXACT | {"block_size": 32, "max_model_len": 1024, "max_num_seqs": 16}
    with running(model, "full", config=room_for(POLICIES), **options) as engine:
        assert runs_compiled_ranges(engine) == (name != "cohere")
        counts = count_graph_replays(engine)
        answers = ask(engine, prompts, policies, max_tokens=16)
        assert counts["full"] > 0
        engine.assert_idle()
    # Rounding may choose another expert.
    assert_parity(model, answers, policies, most=2)


def test_full_is_stock_bit_for_bit(tmp_path: Path) -> None:
    """With experts, too: same kernels, same bits, with vLLM's own kernels."""
    model = build(tmp_path / "model", "qwen3_moe", head_dim=64, hidden_size=256)
    prompts = prompts_of((5, 33, 130, 700, 900, 17, 64, 250))
    options: dict[str, Any] = COMPILED | {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "max_model_len": 1024,
        "dtype": "bfloat16",
    }

    def answers(policy: str | None) -> list[Answer]:
        with running(model, policy, **options) as engine:
            names = [None if policy is None else "full"] * len(prompts)
            return engine.generate(prompts, max_tokens=24, policies=names)

    assert_identical(answers("speed-4"), answers(None))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("in_parallel", [False, True])
def test_tp2_with_experts(tmp_path: Path, in_parallel: bool) -> None:
    """Every rank runs as many passes, whether experts are shared or each has some of them."""
    model = build(tmp_path / "model", "qwen3_moe", head_dim=64, hidden_size=256)
    prompts = prompts_of((97, 33, 200, 5, 161, 64, 130, 250, 48, 500))
    policies = [POLICIES[i % len(POLICIES)] for i in range(len(prompts))]
    options = EXACT | {"block_size": 32, "max_model_len": 1024, "tensor_parallel_size": 2}
    with running(
        model,
        "full",
        config=room_for(POLICIES),
        enable_expert_parallel=in_parallel,
        **options,
    ) as engine:
        answers = ask(engine, prompts, policies, max_tokens=16)
        engine.assert_idle()
    assert_parity(model, answers, policies, most=2)
