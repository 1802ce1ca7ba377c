"""Which stored entries a decode step reads: the reference math of FIER and Quest.

Plain torch on dense tensors, one request and one layer at a time. The paged kernels in ``ops/`` are
tested against these functions, and the offline tools use them as they are.

Shapes: H query heads, G KV heads (H a multiple of G; heads of one group are neighbours), N keys,
D channels, m tokens in a group (FIER's quantisation group, Quest's page).

A step reads the newest group whole, the current token's, whether or not it is full: its keys need
not be quantised yet. Of the other, full groups it reads the best *units*: tokens for FIER, whole
pages for Quest.
"""

import torch
from torch import Tensor

# What products are multiplied with before `reduction=softmax`. 1-bit keys lie half a group's range
# from its middle, so that their products are about twice as large as those of the keys, and a
# page's bounds are too large in any case (benchmarks/results/answers/recall.json).
SOFTMAX_FACTOR = 0.5


def num_full_groups(num_keys: int, group: int) -> int:
    """Groups that a step with `num_keys` keys, its own included, selects from."""
    return (num_keys - 1) // group


def quantize_keys(keys: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """1-bit keys, by group of tokens and channel (FIER Eq. 5 with rounding to nearest).

    keys (G, N, D), N a multiple of `group`, any float dtype ->
        signs (G, N, D) int8, 1 where the key is at or above the middle of its group, else -1;
        scales, zeros (G, N / group, D) float16: half the range and the middle of each group.
    """
    grouped = keys.float().unflatten(1, (-1, group))
    high, low = grouped.amax(dim=2), grouped.amin(dim=2)
    zeros, scales = (high + low) / 2, (high - low) / 2
    signs = torch.where(grouped >= zeros[:, :, None], 1, -1).to(torch.int8).flatten(1, 2)
    # Wider than float16 only where a cache of bfloat16 holds what no attention survives.
    limit = torch.finfo(torch.float16).max
    return signs, *(x.clamp(-limit, limit).to(torch.float16) for x in (scales, zeros))


def token_scores(query: Tensor, signs: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Products with the quantised keys: query (H, D) -> (H, N) float32 (FIER Algorithm 1)."""
    heads, kv_heads = query.shape[0], signs.shape[0]
    group = signs.shape[1] // max(scales.shape[1], 1)
    keys = zeros.float().repeat_interleave(group, dim=1)
    keys = keys + scales.float().repeat_interleave(group, dim=1) * signs
    keys = keys.repeat_interleave(heads // kv_heads, dim=0)
    return torch.einsum("hd,hnd->hn", query.float(), keys)


def page_scores(query: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Upper bounds of a page's products: query (H, D) -> (H, N / page) float32 (Quest).

    Channel by channel the larger of query x maximum and query x minimum, which is
    query x zero + |query| x scale.
    """
    query = query.float()
    share = query.shape[0] // scales.shape[0]
    zeros, scales = (x.float().repeat_interleave(share, dim=0) for x in (zeros, scales))
    return torch.einsum("hd,hnd->hn", query, zeros) + torch.einsum(
        "hd,hnd->hn", query.abs(), scales
    )


def reduce_heads(scores: Tensor, num_kv_heads: int, reduction: str, scale: float) -> Tensor:
    """One score per KV head from those of the query heads that share it: (H, n) -> (G, n).

    reduction: `max` or `sum` of the products, or `softmax`: sum of each head's share of the softmax
        of halved products over the n units. scale: what attention multiplies products with before
        its softmax.
    """
    if reduction == "softmax":
        scores = (scores * (scale * SOFTMAX_FACTOR)).softmax(dim=-1)
    grouped = scores.unflatten(0, (num_kv_heads, -1))
    return grouped.amax(dim=1) if reduction == "max" else grouped.sum(dim=1)


def select_units(scores: Tensor, num_keys: int, group: int, unit: int, budget: int) -> Tensor:
    """Keys that a step reads, ascending, of one KV head.

    Args:
        scores: (n,) of the units in the full groups; of equal ones the lower index wins.
        num_keys: N, the current token's included. unit: tokens per unit: 1 or `group`.
        budget: tokens to read; the newest group counts, and is read whole.

    Returns:
        (count,) int64 indices of keys; all N if there are no more than `budget`.
    """
    if num_keys <= budget:
        return torch.arange(num_keys, device=scores.device)
    newest = torch.arange(num_full_groups(num_keys, group) * group, num_keys, device=scores.device)
    # A page costs its whole size, also the newest, which need not be full.
    left = budget // unit - (1 if unit > 1 else len(newest))
    best = scores.sort(descending=True, stable=True).indices[: max(left, 0)].sort().values
    tokens = (best[:, None] * unit + torch.arange(unit, device=scores.device)).flatten()
    return torch.cat([tokens, newest])
