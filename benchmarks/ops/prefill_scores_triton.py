"""Pooled queries against keys, one number for each block of keys, in Triton.

What `prefill_blocks` computes for `one_bit` in torch, whose products with every key go through
memory. Keys are read as they are unpacked; packed codes would be an eighth of the bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.ops.prefill_blocks import Setting, block_means
from vllm_kvx.equations.retrieval import SOFTMAX_FACTOR

ROWS = 64


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    rows,
    keys,
    out,
    first,
    num_rows,
    num_keys,
    pools,
    pool,
    scale,
    stride_rg,
    stride_kg,
    stride_kn,
    stride_og,
    stride_or,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
):
    head = tl.program_id(2)
    block = tl.program_id(1)
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    channels = tl.arange(0, D)
    real = index < num_rows
    # Rows of a query head are its pools, in order.
    ends = first + (index % pools + 1) * pool
    found = tl.full([ROWS], float("-inf"), tl.float32)
    if block * BLOCK < tl.max(tl.where(real, ends, 0)):
        places = head * stride_rg + index[:, None] * D + channels[None, :]
        q = tl.load(rows + places, mask=real[:, None], other=0.0)
        inside = tokens < num_keys
        places = head.to(tl.int64) * stride_kg + tokens[None, :] * stride_kn + channels[:, None]
        k = tl.load(keys + places, mask=inside[None, :], other=0.0)
        logits = tl.dot(q, k) * scale
        seen = inside[None, :] & (tokens[None, :] < ends[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        found = tl.max(logits, 1)
        if not MAX:
            # A row that sees none of these keys has a peak of minus infinity.
            peak = tl.maximum(found, -1e30)
            found = peak + tl.log(tl.sum(tl.exp(logits - peak[:, None]), 1))
    tl.store(out + head * stride_og + index * stride_or + block, found, mask=real)


def one_bit_shares(
    query: Tensor, codes: Tensor, first: int, scaling: float, setting: Setting
) -> Tensor:
    """(H, Q, K) float32, see ``prefill_blocks.estimate``; codes: (G, m, D), m = first + n."""
    kv_heads, length, dim = codes.shape
    pooled = block_means(query, setting.pool)
    pools = pooled.shape[1]
    rows = pooled.unflatten(0, (kv_heads, -1)).flatten(1, 2).contiguous()
    blocks = triton.cdiv(length, setting.key_block)
    out = torch.empty(kv_heads, rows.shape[1], blocks, dtype=torch.float32, device=query.device)
    grid = triton.cdiv(rows.shape[1], ROWS), blocks, kv_heads
    _scores[grid](
        rows,
        codes,
        out,
        first,
        rows.shape[1],
        length,
        pools,
        setting.pool,
        scaling * SOFTMAX_FACTOR,
        rows.stride(0),
        codes.stride(0),
        codes.stride(1),
        out.stride(0),
        out.stride(1),
        D=dim,
        ROWS=ROWS,
        BLOCK=setting.key_block,
        MAX=setting.by == "max",
    )
    shares = out.softmax(dim=-1).unflatten(1, (-1, pools)).flatten(0, 1)
    return block_means(shares, setting.block // setting.pool)
