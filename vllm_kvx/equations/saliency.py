"""Which keys the end of a prompt attends to: the reference math of FastKV, SnapKV and StructKV.

Plain torch on dense tensors, one request and one layer at a time. The paged kernels in ``ops/`` are
tested against these functions, and the offline tools use them as they are.

Shapes: H query heads, G KV heads (H a multiple of G; heads of one group are neighbours), N keys,
w window queries, D channels. The window is the last w of the N tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kvx.equations.softmax import capped, softmax


def window_attention(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax rows of the window's queries over every key they may see.

    queries (H, w, D), keys (G, N, D), any float dtype -> (H, w, N) float32; 0 at later keys.
    soft_cap, sinks: of the model's attention, see ``equations.softmax``; None without.
    """
    heads, window, _ = queries.shape
    keys = keys.repeat_interleave(heads // keys.shape[0], dim=0)
    scores = capped(queries.float() @ keys.float().transpose(1, 2) * scale, soft_cap)
    num_keys = keys.shape[1]
    last_visible = torch.arange(num_keys - window, num_keys, device=keys.device)
    hidden = torch.arange(num_keys, device=keys.device) > last_visible[:, None]
    return softmax(scores.masked_fill(hidden, float("-inf")), sinks)


def saliency(attention: Tensor, reduction: str = "sum") -> Tensor:
    """Attention that each key outside the window gets from it (StructKV Eq. 2, per head).

    (H, w, N) -> (H, N - w) float32: the sum over the window, without the window's own columns; with
    `max` the largest weight.
    """
    window = attention.shape[1]
    if reduction == "max":
        return attention[:, :, : attention.shape[2] - window].amax(dim=1)
    return attention.sum(dim=1)[:, : attention.shape[2] - window]


def max_pool(scores: Tensor, kernel: int) -> Tensor:
    """Maximum over `kernel` neighbours, an odd number; (H, n) -> (H, n), edges see fewer."""
    if scores.shape[-1] == 0:
        return scores
    return F.max_pool1d(scores[None], kernel, stride=1, padding=kernel // 2)[0]


def per_kv_head(scores: Tensor, num_kv_heads: int, reduction: str = "sum") -> Tensor:
    """Sum over the query heads that share a KV head, or the largest: (H, n) -> (G, n)."""
    grouped = scores.unflatten(0, (num_kv_heads, -1))
    if reduction == "max":
        return grouped.amax(dim=1)
    # Head by head: torch's own sum adds some columns in another order, and equal ones must stay so.
    total = grouped[:, 0].clone()
    for head in range(1, grouped.shape[1]):
        total += grouped[:, head]
    return total


def propagation_scores(attention: Tensor, kernel: int, reduction: str) -> Tensor:
    """What a layer chooses the tokens for the layers above it by: one score for all heads.

    attention (H, w, N) float32, from `window_attention` -> (N - w,) float32. `sum` adds up a head's
    window rows, pools, and adds up the heads (FastKV). `max` takes the largest weight that any head
    gives a key in any window row, and pools it. kernel: width of the pooling; 1 gives the unpooled
    scores.
    """
    if reduction == "sum":
        return per_kv_head(max_pool(saliency(attention), kernel), 1)[0]
    if reduction == "max":
        outside = attention.shape[2] - attention.shape[1]
        return max_pool(attention[:, :, :outside].amax(dim=(0, 1))[None], kernel)[0]
    raise ValueError(f"reduction must be sum or max, got {reduction!r}")


def kept_indices(scores: Tensor, count: int, window: int, unpooled: Tensor | None = None) -> Tensor:
    """The `count - window` best of n keys and the `window` keys that follow them, ascending.

    Max-pooling gives neighbours one score: of equal ones the higher unpooled score wins, so that
    the key itself stays before its neighbours, then the lower index.

    scores (..., n) float -> (..., count) int64, count >= window. unpooled: (..., n), reduced over
    the heads as `scores` are; None where nothing was pooled. All n + window keys if there are no
    more than `count`.
    """
    num_scored = scores.shape[-1]
    best = min(count - window, num_scored)
    if unpooled is None:
        order = scores.sort(dim=-1, descending=True, stable=True).indices
    else:
        first = unpooled.sort(dim=-1, descending=True, stable=True).indices
        second = scores.gather(-1, first).sort(dim=-1, descending=True, stable=True).indices
        order = first.gather(-1, second)
    order = order[..., :best]
    recent = torch.arange(num_scored, num_scored + window, device=scores.device)
    return torch.cat([order.sort(dim=-1).values, recent.expand(*order.shape[:-1], window)], dim=-1)
