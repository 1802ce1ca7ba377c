"""Scores max-pooled over neighbouring keys, then summed over the query heads of each KV head.

FastKV and SnapKV pool, so that the neighbours of a key that the window attends to stay with it.
Pooling makes them equal; which of them stay, if not all do, the unpooled sums decide. The batch is
ragged as in `saliency`.
"""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.equations import saliency as dense

# An interpreted program costs the same whatever its size.
_POOL_BLOCK = {"cuda": 1024, "cpu": 8192}


def pool_per_kv_head(
    scores: Tensor,
    num_kv_heads: int,
    num_keys: Tensor,
    windows: Tensor,
    offsets: Tensor,
    kernels: Tensor,
    max_num_keys: int,
    unpooled: Tensor | None = None,
    reduction: str = "sum",
) -> Tensor:
    """Max-pools each query head's scores and sums the query heads of each KV head, in order.

    Neighbours are the request's keys outside its window, at the edges fewer than the kernel.

    Args:
        scores: (H, total_keys) float32, at least 0, as from `window_saliency`; unit stride
            along a row.
        num_kv_heads: G; 1 sums over all heads.
        num_keys, windows, offsets: as in `window_saliency`.
        kernels: (F,) int32, odd; 1 does not pool.
        max_num_keys: at least the largest of `num_keys`.
        unpooled: (G, total_keys) float32, contiguous, where the same sums without pooling are
            written; None if nobody needs them.
        reduction: over the query heads, `sum` or `max`.

    Returns:
        (G, total_keys) float32. Columns of window keys hold 0; those from offsets[F] on are
        not written.
    """
    num_heads, total_keys = scores.shape
    pooled = torch.empty(num_kv_heads, total_keys, dtype=torch.float32, device=scores.device)
    if not (num_keys.shape[0] and total_keys):
        return pooled
    block = _POOL_BLOCK[scores.device.type]
    grid = (triton.cdiv(max_num_keys, block), num_kv_heads, num_keys.shape[0])
    _pool_kernel[grid](
        scores,
        scores.stride(0),
        num_keys,
        windows,
        offsets,
        kernels,
        pooled,
        unpooled,
        total_keys,
        POOLED_ONLY=unpooled is None,
        MAXIMUM=reduction == "max",
        GROUP=num_heads // num_kv_heads,
        BLOCK=block,
    )
    return pooled


@triton.jit(
    do_not_specialize=[
        "scores_stride",
        "num_keys",
        "windows",
        "offsets",
        "kernels",
        "pooled_stride",
    ],
)
def _pool_kernel(
    scores,
    scores_stride,
    num_keys,
    windows,
    offsets,
    kernels,
    pooled,
    unpooled,
    pooled_stride,
    POOLED_ONLY: tl.constexpr,
    MAXIMUM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(2)
    length = tl.load(num_keys + request)
    first = tl.program_id(0) * BLOCK
    if first >= length:
        return
    outside = length - tl.load(windows + request)
    reach = tl.load(kernels + request) // 2
    offset = tl.load(offsets + request)
    kv_head = tl.program_id(1).to(tl.int64)
    key = first + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    peaks = tl.zeros((BLOCK,), dtype=tl.float32)
    for head in range(GROUP):
        row = scores + (kv_head * GROUP + head) * scores_stride + offset
        best = tl.zeros((BLOCK,), dtype=tl.float32)
        for shift in range(-reach, reach + 1):
            near = key + shift
            mask = (near >= 0) & (near < outside)
            best = tl.maximum(best, tl.load(row + near, mask=mask, other=0.0))
        total = tl.maximum(total, best) if MAXIMUM else total + best
        if not POOLED_ONLY:
            peak = tl.load(row + key, mask=key < outside, other=0.0)
            peaks = tl.maximum(peaks, peak) if MAXIMUM else peaks + peak
    result = tl.where(key < outside, total, 0.0)
    at = kv_head * pooled_stride + offset + key
    tl.store(pooled + at, result, mask=key < length)
    if not POOLED_ONLY:
        tl.store(unpooled + at, peaks, mask=key < length)


def pool_per_kv_head_reference(
    scores: Tensor,
    num_kv_heads: int,
    num_keys: Tensor,
    windows: Tensor,
    offsets: Tensor,
    kernels: Tensor,
    reduction: str = "sum",
) -> Tensor:
    """`pool_per_kv_head` in plain torch, one request after the other; (G, offsets[F])."""
    pooled = scores.new_zeros(num_kv_heads, int(offsets[-1]))
    sizes = (num_keys.tolist(), windows.tolist(), kernels.tolist())
    for f, (length, window, kernel) in enumerate(zip(*sizes, strict=True)):
        if length == window:
            continue
        columns = slice(int(offsets[f]), int(offsets[f]) + length - window)
        best = dense.max_pool(scores[:, columns], kernel)
        pooled[:, columns] = dense.per_kv_head(best, num_kv_heads, reduction)
    return pooled
