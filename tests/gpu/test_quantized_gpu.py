"""Quantised weights in the formats that people serve, with vLLM's own kernels. Needs a GPU.

A format that stock vLLM does not serve on this GPU is skipped, with vLLM's own words.
"""

from pathlib import Path

import pytest
import torch
from support.engine import forget_ranks, running
from support.expected import named
from support.gpu import COMPILED
from support.inside import count_graph_replays, runs_compiled_ranges
from support.parity import ask, room_for
from support.prompts import prompts_of
from support.quantized import FORMATS, make
from support.quantized_answers import (
    POLICIES,
    assert_chunked_near,
    assert_dequantised,
    assert_near,
    assert_same_bits,
    run,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS, MAX_TOKENS = (161, 290, 400, 700), 16
# Stock and ours compile apart and then round apart; without torch.compile the bits are the same.
SAME_BITS = COMPILED | {
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 28,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


@pytest.fixture(autouse=True)
def ranks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_ranks()
    # It would compile a kernel for every shape of tiny matrices, with nvcc.
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")


@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_a_format(tmp_path: Path, name: str) -> None:
    """`full` is stock bit for bit; policies are near their references, whole and in chunks."""
    quantized = make(tmp_path, FORMATS[name])
    ran = run(quantized, POLICIES, LENGTHS, MAX_TOKENS, **SAME_BITS)
    assert_same_bits(ran)
    assert_dequantised(quantized, ran.stock)
    assert_near(quantized, ran.whole, POLICIES)
    assert_chunked_near(quantized, ran, POLICIES)


@pytest.mark.parametrize("name", ["fp8_compressed", "awq", "mxfp4_experts"])
def test_compiled(tmp_path: Path, name: str) -> None:
    """On the engine's default path: fusions with quantisation, ranges of the compiled decoder."""
    quantized = make(tmp_path, FORMATS[name])
    # SwiftKV needs every row of the layer that others split.
    policies = [policy for policy in POLICIES if not named(policy).startswith("swiftkv")]
    prompts = prompts_of(LENGTHS)
    options = quantized.options | COMPILED | {"block_size": 32, "max_model_len": 1024}
    with running(quantized.path, "full", config=room_for(policies), **options) as engine:
        assert runs_compiled_ranges(engine)
        counts = count_graph_replays(engine)
        answers = {
            named(policy): ask(engine, prompts, [policy] * len(prompts), max_tokens=MAX_TOKENS)
            for policy in policies
        }
        assert counts["full"] > 0
        engine.assert_idle()
    assert_near(quantized, answers, policies)
