"""Quantised weights on a CPU: 4-bit integers by vLLM's own kernels, and FP8 by torch's.

What retains or retrieves needs float32 here, and 4-bit weights 16 bits. tests/gpu has the rest.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference.masked import layers_of, output_weight
from reference.swiftkv import Swift
from support import inside
from support.expected import FULL, Speed
from support.nightly import by_day, nightly
from support.quantized import FORMATS, make
from support.quantized_answers import (
    POLICIES,
    assert_chunked_near,
    assert_dequantised,
    assert_near,
    assert_same_bits,
    run,
)

LENGTHS, MAX_TOKENS = (97, 161, 290), 8


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(),
    reason="vLLM multiplies 4-bit integers on processors with AVX-512 alone",
)
@pytest.mark.parametrize("name", by_day(["awq", "gptq"], {0}))
def test_integer_weights(tmp_path: Path, name: str) -> None:
    """`full` is stock bit for bit, and policies that propagate by position are near theirs."""
    quantized = make(tmp_path, FORMATS[name])
    policies = [FULL, Speed(4), Swift(2)]
    ran = run(quantized, policies, LENGTHS, MAX_TOKENS, look=inside.value_factors)
    assert_same_bits(ran)
    assert_dequantised(quantized, ran.stock)
    assert_near(quantized, ran.whole, policies)
    assert_chunked_near(quantized, ran, policies)
    # CriticalKV knows how long values become by the packed weights, as if they were plain ones.
    for found, layer in zip(ran.seen, layers_of(quantized.model), strict=True):
        weights = output_weight(layer).detach().unflatten(1, found.shape[:2]).movedim(1, 0)
        gram = weights.mT @ weights
        assert (found.mT @ found - gram).abs().max() < 0.02 * gram.abs().max()


@nightly
def test_fp8_weights_and_inputs(tmp_path: Path) -> None:
    """All policies, with what tests/gpu does, in float32."""
    quantized = make(tmp_path, replace(FORMATS["fp8_compressed"], dtype="float32"))
    ran = run(quantized, POLICIES, LENGTHS, 4)
    assert_same_bits(ran)
    assert_dequantised(quantized, ran.stock)
    assert_near(quantized, ran.whole, POLICIES)
    assert_chunked_near(quantized, ran, POLICIES)
