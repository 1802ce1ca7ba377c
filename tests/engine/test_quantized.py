"""Quantised weights on a CPU: 4-bit integers by vLLM's own kernels, and FP8 by torch's.

What retains or retrieves needs float32 here, and 4-bit weights 16 bits. tests/gpu has the rest.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference.masked import layers_of, output_weight
from reference.swiftkv import Swift
from support.engine import Engine
from support.expected import FULL, Speed
from support.nightly import by_day, nightly
from support.quantized import FORMATS, make
from support.quantized_answers import (
    POLICIES,
    assert_dequantised,
    assert_near,
    assert_same_bits,
    run,
)

from vllm_kvx.models.attention import attention_layers, output_projections
from vllm_kvx.worker.prefill.projections import value_factors

LENGTHS, MAX_TOKENS = (97, 161, 290), 8


@pytest.mark.parametrize("name", by_day(["awq", "gptq"], {0}))
def test_integer_weights(tmp_path: Path, name: str) -> None:
    """`full` is stock bit for bit, and policies that propagate by position are near theirs."""
    quantized = make(tmp_path, FORMATS[name])
    policies = [FULL, Speed(4), Swift(2)]
    ran = run(quantized, policies, LENGTHS, MAX_TOKENS, look=_factors)
    assert_same_bits(ran)
    assert_dequantised(quantized, ran.stock)
    assert_near(quantized, ran.whole, policies)
    assert_near(quantized, ran.chunked, policies)
    # CriticalKV knows how long values become by the packed weights, as if they were plain ones.
    for found, layer in zip(ran.seen, layers_of(quantized.model), strict=True):
        weights = output_weight(layer).detach().unflatten(1, found.shape[:2]).movedim(1, 0)
        gram = weights.mT @ weights
        assert (found.mT @ found - gram).abs().max() < 0.02 * gram.abs().max()


def _factors(engine: Engine) -> list[torch.Tensor]:
    """Of each layer's output projection, (H, D, D) float32."""
    layers = attention_layers(engine.runner.vllm_config, 8)
    return [
        value_factors(each, layers[0].num_heads, layers[0].head_size, torch.float16).float()
        for each in output_projections(engine.runner.model, layers)
    ]


@nightly
def test_fp8_weights_and_inputs(tmp_path: Path) -> None:
    """All policies, with what tests/gpu does, in float32."""
    quantized = make(tmp_path, replace(FORMATS["fp8_compressed"], dtype="float32"))
    ran = run(quantized, POLICIES, LENGTHS, 4)
    assert_same_bits(ran)
    assert_dequantised(quantized, ran.stock)
    assert_near(quantized, ran.whole, POLICIES)
    assert_near(quantized, ran.chunked, POLICIES)
