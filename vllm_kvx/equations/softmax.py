"""What some models do to attention's logits before the softmax: soft caps, and sinks.

Plain torch. The kernels in ``ops/`` are tested against these functions.
"""

import torch
from torch import Tensor


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """``soft_cap * tanh(logits / soft_cap)``, as in Gemma 2; the logits themselves without a cap.

    logits: of any shape, already scaled. soft_cap: above 0, or None.
    """
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def softmax(logits: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the last dimension; sinks take a share of it, so that a row's sum is below 1.

    logits: (H, ..., n) float. sinks: (H,), one more logit in every row of a head, as in gpt-oss,
        which is neither scaled nor capped; None without.
    Returns: like `logits`.
    """
    if sinks is None:
        return logits.softmax(dim=-1)
    more = sinks.to(logits.dtype).view(-1, *[1] * (logits.dim() - 1))
    both = torch.cat([logits, more.expand(*logits.shape[:-1], 1)], dim=-1)
    return both.softmax(dim=-1)[..., :-1]
