"""8-bit integers with a scale for each token, KV head, and key or value, in plain torch.

The numbers are those of vLLM's `int8_per_token_head`: the largest of a head's channels becomes 127.
"""

import torch
from torch import Tensor

MOST = 127.0
# What is all zeros has a scale, too, as vLLM's kernel has it.
LEAST_SCALE = 1e-6


def quantized(x: Tensor, scales: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Rounds as vLLM's store kernel does.

    x: (..., D), any float dtype. scales: dtype of the scales; numbers are made by the rounded one.

    Returns:
        numbers (..., D) int8, and scales (...): a number times its scale stands for a channel.
    """
    x = x.float()
    scale = (x.abs().amax(dim=-1) / MOST).clamp(min=LEAST_SCALE).to(scales)
    numbers = x * (1 / scale.float())[..., None]
    # Half away from zero: the conversion to integers truncates.
    numbers = torch.where(numbers >= 0, numbers + 0.5, numbers - 0.5)
    return numbers.clamp(-MOST - 1, MOST).to(torch.int8), scale


def undone(numbers: Tensor, scales: Tensor) -> Tensor:
    """What 8-bit numbers stand for: (..., D) int8 and (...) -> (..., D) float32."""
    return numbers.float() * scales.float()[..., None]
