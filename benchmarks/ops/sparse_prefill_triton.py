"""Block-sparse causal prefill over a paged cache, in Triton: what FlashAttention is compared with.

A program takes a few queries of one block with all query heads of a KV head, 128 rows or so, and
goes over the blocks of keys that the block of queries reads; their tokens are found by the
request's block table. The reference is ``prefill_blocks.attend``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvx.ops.paged import PagedKV


@dataclass(frozen=True)
class Tiles:
    """queries: of a program. keys: tokens of a step of its loop. warps, stages: see Triton."""

    queries: int = 32
    keys: int = 64
    warps: int = 8
    stages: int = 3


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    q,
    tokens,
    own,
    last_token,
    table,
    keys,
    values,
    stride_kb,
    stride_kt,
    stride_vb,
    stride_vt,
    scale,
    peak,
    total,
    acc,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys: new maxima, sums and weighted values of the rows, at positions `own`."""
    inside = tl.minimum(tokens, last_token)
    pages = tl.load(table + inside // PAGE).to(tl.int64)
    channels = tl.arange(0, D)
    places = keys + pages * stride_kb + (inside % PAGE) * stride_kt
    k = tl.load(places[None, :] + channels[:, None])
    logits = tl.dot(q, k) * scale
    if MASKED:
        logits = tl.where(tokens[None, :] <= own[:, None], logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    weights = tl.exp2(logits - new_peak[:, None])
    rest = tl.exp2(peak - new_peak)
    total = total * rest + tl.sum(weights, 1)
    places = values + pages * stride_vb + (inside % PAGE) * stride_vt
    v = tl.load(places[:, None] + channels[None, :])
    acc = tl.dot(weights.to(v.dtype), v, acc * rest[:, None])
    return new_peak, total, acc


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    out,
    table,
    chosen,
    counts,
    first,
    num_queries,
    scale,
    stride_qn,
    stride_qh,
    stride_on,
    stride_oh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_hg,
    stride_hq,
    stride_cg,
    blocks,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    PARTS: tl.constexpr = BLOCK // QUERIES
    TILES: tl.constexpr = BLOCK // KEYS
    program = tl.program_id(0)
    head = tl.program_id(1)
    # Those with the most keys begin first.
    block = blocks - 1 - program // PARTS
    begin = block * BLOCK + (program % PARTS) * QUERIES
    rows = tl.arange(0, QUERIES * SHARED)
    own = begin + rows // SHARED
    heads = head * SHARED + rows % SHARED
    channels = tl.arange(0, D)
    real = own < num_queries
    places = own.to(tl.int64) * stride_qn + heads * stride_qh
    q = tl.load(query + places[:, None] + channels[None, :], mask=real[:, None], other=0.0)
    peak = tl.full([QUERIES * SHARED], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * SHARED], tl.float32)
    acc = tl.zeros([QUERIES * SHARED, D], tl.float32)
    keys += head * stride_kh
    values += head * stride_vh
    chosen += head * stride_hg + block * stride_hq
    count = tl.load(counts + head * stride_cg + block)
    seen = first + own
    last_token = first + num_queries - 1
    for step in range(0, (count - 1) * TILES):
        start = tl.load(chosen + step // TILES) * BLOCK + (step % TILES) * KEYS
        tokens = start + tl.arange(0, KEYS)
        peak, total, acc = _step(
            q,
            tokens,
            seen,
            last_token,
            table,
            keys,
            values,
            stride_kb,
            stride_kt,
            stride_vb,
            stride_vt,
            scale,
            peak,
            total,
            acc,
            PAGE,
            D,
            False,
        )
    # The block of the queries themselves, up to the last of this program.
    diagonal = first + block * BLOCK
    for start in range(diagonal, first + begin + QUERIES, KEYS):
        tokens = start + tl.arange(0, KEYS)
        peak, total, acc = _step(
            q,
            tokens,
            seen,
            last_token,
            table,
            keys,
            values,
            stride_kb,
            stride_kt,
            stride_vb,
            stride_vt,
            scale,
            peak,
            total,
            acc,
            PAGE,
            D,
            True,
        )
    acc = acc / total[:, None]
    places = own.to(tl.int64) * stride_on + heads * stride_oh
    to = out + places[:, None] + channels[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None])


def attend_blocks(
    query: Tensor,
    paged: PagedKV,
    table: Tensor,
    chosen: Tensor,
    counts: Tensor,
    first: int,
    block: int,
    tiles: Tiles,
    out: Tensor,
) -> Tensor:
    """Writes and returns `out` (n, H, D): attention of the queries to the blocks they read.

    Args:
        query: (n, H, D), of positions `first` and on; first is a multiple of block. H / G is a
            power of two.
        table: (pages,) int32 of the request.
        chosen: (G, Q, most) int32, the blocks that a block of queries reads, ascending, its own
            last. counts: (G, Q) int32, how many these are. block: tokens of either.
    """
    length, heads, dim = query.shape
    blocks = chosen.shape[1]
    grid = blocks * (block // tiles.queries), paged.num_heads
    _attend[grid](
        query,
        paged.keys,
        paged.values,
        out,
        table,
        chosen,
        counts,
        first,
        length,
        dim**-0.5 * 1.4426950408889634,  # exp2 in place of exp.
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        paged.keys.stride(0),
        paged.keys.stride(2),
        paged.keys.stride(1),
        paged.values.stride(0),
        paged.values.stride(2),
        paged.values.stride(1),
        chosen.stride(0),
        chosen.stride(1),
        counts.stride(0),
        blocks,
        SHARED=heads // paged.num_heads,
        D=dim,
        BLOCK=block,
        PAGE=paged.block_size,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def listed(reads: Tensor) -> tuple[Tensor, Tensor]:
    """Lists (G, Q, most) int32 of the blocks that are read, ascending, and their counts (G, Q).

    reads: (G, Q, K) bool. What follows a list's count has no meaning. Copies one number to the
    host, the longest list: a server would have a bound.
    """
    counts = reads.sum(dim=-1, dtype=torch.int32)
    order = (~reads).to(torch.uint8).sort(dim=-1, stable=True).indices
    return order[..., : int(counts.max())].int().contiguous(), counts
