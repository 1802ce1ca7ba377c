"""Quantised weights on a CPU: 4-bit integers by vLLM's own kernels, and FP8 by torch's.

What retains or retrieves needs float32 here, and 4-bit weights 16 bits. tests/gpu has the rest.
"""

from pathlib import Path

import pytest
import torch
from reference.masked import layers_of, output_weight
from reference.swiftkv import Swift
from support.engine import running
from support.expected import FULL, Speed, named
from support.nightly import by_day, nightly
from support.parity import assert_identical
from support.quantized import FORMATS, make
from support.quantized_answers import POLICIES, assert_dequantised, assert_near, run

from vllm_kvx.models.attention import attention_layers, output_projections
from vllm_kvx.ops.prompt.value_norms import factors_of
from vllm_kvx.worker.prefill.projections import value_factors

LENGTHS, MAX_TOKENS = (97, 161, 290), 8


@pytest.mark.parametrize("name", by_day(["awq", "gptq"], {0}))
def test_integer_weights(tmp_path: Path, name: str) -> None:
    """`full` is stock bit for bit, and policies that propagate by position are near theirs."""
    quantized = make(tmp_path, FORMATS[name])
    policies = [FULL, Speed(4), Swift(2)]
    ran = run(quantized, policies, LENGTHS, MAX_TOKENS)
    assert_identical(ran.whole[named(FULL)], ran.stock)
    assert_dequantised(quantized, ran.stock)
    assert_near(quantized, ran.whole, policies)
    assert_near(quantized, ran.chunked, policies)
