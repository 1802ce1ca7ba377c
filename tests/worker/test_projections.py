"""Factors of output projections, read through the layer's own kernel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_kvx.worker.prefill.projections import value_factors

HEADS, HEAD_DIM, HIDDEN = 3, 32, 80


def projection(weight: Tensor) -> Any:
    """What is read of vLLM's linear layer: one that packs its weights, with a bias."""
    linear: Any = torch.nn.Linear(1, 1)
    linear.packed = weight.t().contiguous()
    linear.quant_method = SimpleNamespace(apply=lambda layer, rows: rows @ layer.packed)
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_keep_their_own_columns(dtype: torch.dtype) -> None:
    weight = torch.randn(HIDDEN, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(0))
    weight = weight.to(dtype)
    factors = value_factors(projection(weight), HEADS, HEAD_DIM, dtype)
    assert factors.shape == (HEADS, HEAD_DIM, HEAD_DIM) and factors.dtype == dtype
    assert factors.is_contiguous()
    value = torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(1))
    for head, part in enumerate(weight.float().split(HEAD_DIM, dim=1)):
        expected = (part @ value).norm()
        assert (factors[head].float() @ value).norm() == pytest.approx(float(expected), rel=1e-2)


def test_ranks_have_the_factors_of_one() -> None:
    """A rank's shard holds the columns of its heads, and all rows of these."""
    weight = torch.randn(HIDDEN, 4 * HEAD_DIM, generator=torch.Generator().manual_seed(2))
    whole = value_factors(projection(weight), 4, HEAD_DIM, torch.float32)
    shards = [
        value_factors(projection(shard), 2, HEAD_DIM, torch.float32)
        for shard in weight.chunk(2, dim=1)
    ]
    gram = torch.cat(shards).mT @ torch.cat(shards)
    torch.testing.assert_close(gram, whole.mT @ whole, rtol=1e-4, atol=1e-4)


def test_rounded_inputs_change_no_order() -> None:
    """8-bit inputs: exact with a scale for each row, times one number with a fixed one."""
    weight = torch.randn(HIDDEN, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(3))

    def rounding(scale: float | None) -> Any:
        def apply(_layer: Any, rows: Tensor) -> Tensor:
            scales = rows.abs().amax(1, keepdim=True) / 448 if scale is None else scale
            return (rows / scales).to(torch.float8_e4m3fn).float() * scales @ weight.t()

        linear = projection(weight)
        linear.quant_method = SimpleNamespace(apply=apply)
        return linear

    plain, by_row, fixed = (
        value_factors(linear, HEADS, HEAD_DIM, torch.float32)
        for linear in (projection(weight), rounding(None), rounding(0.037))
    )
    torch.testing.assert_close(by_row, plain, rtol=1e-4, atol=1e-4)
    ratio = fixed.norm() / plain.norm()
    assert 1e-3 < abs(ratio - 1) < 0.07
    torch.testing.assert_close(fixed, ratio * plain, rtol=1e-4, atol=1e-4)
