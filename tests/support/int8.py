"""What a cache of 8-bit integers holds, with a scale for each token and head."""

from torch import Tensor

NAME = "int8_per_token_head"


def rounded(entries: Tensor) -> Tensor:
    """(..., D) as it is read again: the largest channel of a token and head is 127 steps."""
    steps = (entries.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-6)
    return (entries / steps).round().clamp(-128, 127) * steps
