"""What is known of a decoder's output projections without running them."""

from typing import Any

import torch
from torch import Tensor, nn

from vllm_kvx.ops.prompt.value_norms import factors_of


@torch.no_grad()
def value_factors(
    projection: nn.Module, num_heads: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """Factors of a layer's output projection by query head, as `value_norms` takes them.

    The weights are read by projecting unit vectors with the layer's own kernel, which knows how
    they are packed and quantised. Where the kernel quantises its input, a scale for each row (or
    part of one) stores a unit vector exactly. One scale for all rows multiplies all factors by the
    same number, which changes no order among a layer's entries. With several ranks each has the
    columns of its own heads, and all rows of these, so nothing has to be added up.

    Args:
        projection: vLLM's RowParallelLinear.
        num_heads, head_dim: H and D of this rank.
        dtype: the model's.

    Returns:
        (H, D, D) of `dtype`.
    """
    linear: Any = projection
    device = next(p.device for p in [*linear.parameters(), *linear.buffers()])
    unit = torch.eye(num_heads * head_dim, dtype=dtype, device=device)
    factors = torch.empty(num_heads, head_dim, head_dim, dtype=dtype, device=device)
    for head, rows in enumerate(unit.split(head_dim)):
        columns = linear.quant_method.apply(linear, rows)  # (D, hidden)
        factors[head] = factors_of(columns.t()[None])[0]
    return factors
