"""Exact attention over selected entries of the paged KV cache, one query token per row."""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.equations.softmax import capped as capped_reference
from vllm_kvx.equations.softmax import softmax
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.ops.softmax import capped, factors

ATTEND_PROGRAMS = 256
MAX_SPLITS = 32
_TILE = 64
# What weights with the scales of values in them are multiplied by, before they are rounded to 16
# bits: a power of two by which float16 holds those of the smallest values (``LEAST_SCALE``) and of
# the largest that it holds at all.
WEIGHT_FACTOR = 64.0


def attend(
    query: Tensor,
    paged: PagedKV,
    block_table: Tensor,
    rows: RetrievalRows,
    indices: Tensor,
    counts: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    *,
    unit: int,
    scale: float,
    key_scale: float,
    value_scale: float,
    splits: int,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Softmax attention of each row over the units listed for it; other rows stay as they are.

    Entries of 8-bit integers are read as they are: a product is multiplied by its key's scale, a
    weight by its value's.

    Args:
        query: (N, H, D); out: (N, H, D), written at the rows' tokens.
        block_table: (B, max_blocks) int32.
        indices: (R, G, K) int32 units, counts: (R, G) int32; see ``topk``. Either contiguous, or
            one list for all rows and heads, expanded.
        partial: (R, H, splits, D) float32, partial_lse: (R, H, splits) float32, scratch.
        unit: tokens per unit. key_scale, value_scale: what an fp8 cache's entries are multiplied
            with; beside the scales of `paged`, if it has some. splits: programs that share a row
            and head.
        soft_cap: of the logits, above 0; sinks: (H,), any float dtype; see ``equations.softmax``.
            None where the model's attention has none.
    """
    heads, head_dim = query.shape[1], query.shape[2]
    kv_heads, num_rows = paged.num_heads, rows.lens.shape[0]
    share = heads // kv_heads
    keys, values = paged.keys, paged.values
    key_scales, value_scales = paged.key_scales, paged.value_scales
    _attend_kernel[(splits, kv_heads, num_rows)](
        query,
        keys,
        values,
        key_scales,
        value_scales,
        block_table,
        rows.tokens,
        rows.requests,
        rows.lens,
        indices,
        counts,
        partial,
        partial_lse,
        *factors(scale * key_scale, soft_cap),
        value_scale if value_scales is None else value_scale / WEIGHT_FACTOR,
        query.stride(0),
        query.stride(1),
        *keys.stride(),
        *values.stride(),
        *((0, 0, 0) if key_scales is None else key_scales.stride()),
        *((0, 0, 0) if value_scales is None else value_scales.stride()),
        block_table.stride(0),
        _list_stride(indices),
        splits,
        BLOCK_SIZE=paged.block_size,
        D=head_dim,
        SHARE=share,
        PADDED=max(16, triton.next_power_of_2(share)),
        UNIT=unit,
        TILE=_TILE,
        FACTOR=WEIGHT_FACTOR,
        EXACT=query.dtype == torch.float32,
        num_warps=4,
    )
    _combine_kernel[(heads, num_rows)](
        rows.tokens,
        rows.lens,
        partial,
        partial_lse,
        out,
        out.stride(0),
        out.stride(1),
        splits,
        sinks,
        D=head_dim,
        BLOCK=triton.next_power_of_2(splits),
    )


def _list_stride(indices: Tensor) -> int:
    """From the units of a row and head to the next one's; 0 where all read one list."""
    # A dimension of one may have any stride.
    if all(indices.shape[i] == 1 or not indices.stride(i) for i in (0, 1)):
        return 0
    assert indices.is_contiguous()
    return indices.shape[2]


@triton.jit
def _attend_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    block_table,
    row_tokens,
    row_requests,
    row_lens,
    indices,
    counts,
    partial,
    partial_lse,
    scale,
    soft_cap,
    value_scale,
    query_stride,
    query_head_stride,
    key_block_stride,
    key_head_stride,
    key_slot_stride,
    key_dim_stride,
    value_block_stride,
    value_head_stride,
    value_slot_stride,
    value_dim_stride,
    key_scale_block_stride,
    key_scale_head_stride,
    key_scale_slot_stride,
    value_scale_block_stride,
    value_scale_head_stride,
    value_scale_slot_stride,
    table_stride,
    list_stride,
    splits,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    SHARE: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    FACTOR: tl.constexpr,
    EXACT: tl.constexpr,
):
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(row_lens + row)
    if length == 0:
        return
    place = row * tl.num_programs(1) + head
    num_entries = tl.load(counts + place) * UNIT
    per_split = tl.cdiv(tl.cdiv(num_entries, splits), TILE) * TILE
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_entries)
    chosen = indices + place.to(tl.int64) * list_stride
    table = block_table + tl.load(row_requests + row).to(tl.int64) * table_stride

    channel = tl.arange(0, D)
    one = tl.arange(0, PADDED)
    token = tl.load(row_tokens + row).to(tl.int64)
    at = query + token * query_stride + (head * SHARE + one)[:, None] * query_head_stride
    q = tl.load(at + channel[None, :], mask=one[:, None] < SHARE, other=0.0)
    tile = tl.arange(0, TILE)
    peak = tl.full((PADDED,), float("-inf"), tl.float32)
    mass = tl.zeros((PADDED,), tl.float32)
    total = tl.zeros((PADDED, D), tl.float32)
    if key_scales is not None:
        key_scale_base = key_scales + head.to(tl.int64) * key_scale_head_stride
        value_scale_base = value_scales + head.to(tl.int64) * value_scale_head_stride
    key_base = keys + head.to(tl.int64) * key_head_stride
    value_base = values + head.to(tl.int64) * value_head_stride
    for start in range(begin, end, TILE):
        entry = start + tile
        inside = entry < end
        index = tl.load(chosen + entry // UNIT, mask=inside, other=0) * UNIT + entry % UNIT
        inside = inside & (index < length)
        block = tl.load(table + index // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = index % BLOCK_SIZE
        key_at = (block * key_block_stride + slot * key_slot_stride)[:, None]
        key_at += channel[None, :] * key_dim_stride
        key = tl.load(key_base + key_at, mask=inside[:, None], other=0.0)
        value_at = (block * value_block_stride + slot * value_slot_stride)[:, None]
        value_at += channel[None, :] * value_dim_stride
        value = tl.load(value_base + value_at, mask=inside[:, None], other=0.0)
        if EXACT:
            s = tl.dot(q, tl.trans(key.to(tl.float32)), input_precision="ieee")
        else:
            s = tl.dot(q, tl.trans(key.to(q.dtype)))
        if key_scales is not None:
            scale_at = block * key_scale_block_stride + slot * key_scale_slot_stride
            of_key = tl.load(key_scale_base + scale_at, mask=inside, other=0.0)
            s = s * (scale * of_key)[None, :]
        else:
            s = s * scale
        if soft_cap is not None:
            s = capped(s, soft_cap)
        s = tl.where(inside[None, :], s, float("-inf"))
        higher = tl.maximum(peak, tl.max(s, axis=1))
        p = tl.exp(s - higher[:, None])
        fade = tl.exp(peak - higher)
        mass = mass * fade + tl.sum(p, axis=1)
        total = total * fade[:, None]
        if key_scales is not None:
            scale_at = block * value_scale_block_stride + slot * value_scale_slot_stride
            of_value = tl.load(value_scale_base + scale_at, mask=inside, other=0.0)
            p = p * (FACTOR * of_value)[None, :]
        if EXACT:
            total += tl.dot(p, value.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(p.to(q.dtype), value.to(q.dtype))
        peak = higher
    is_head = one < SHARE
    at = (place * SHARE + one).to(tl.int64) * splits + split
    has = mass > 0
    mass = tl.where(has, mass, 1.0)
    total = total * (value_scale / mass)[:, None]
    lse = tl.where(has, peak + tl.log(mass), float("-inf"))
    tl.store(partial_lse + at, lse, mask=is_head)
    tl.store(partial + at[:, None] * D + channel[None, :], total, mask=is_head[:, None])


@triton.jit
def _combine_kernel(
    row_tokens,
    row_lens,
    partial,
    partial_lse,
    out,
    out_stride,
    out_head_stride,
    splits,
    sinks,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    if tl.load(row_lens + row) == 0:
        return
    first = (row * tl.num_programs(0) + head).to(tl.int64) * splits
    split = tl.arange(0, BLOCK)
    lse = tl.load(partial_lse + first + split, mask=split < splits, other=float("-inf"))
    highest = tl.max(lse, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    weight = tl.exp(lse - highest)
    total = tl.sum(weight, axis=0)
    if sinks is not None:  # No part has it: a sink is one logit, however many share a row.
        total += tl.exp(sink - highest)
    weight = weight / total
    channel = tl.arange(0, D)
    at = (first + split)[:, None] * D + channel[None, :]
    parts = tl.load(partial + at, mask=(split < splits)[:, None], other=0.0)
    result = tl.sum(parts * weight[:, None], axis=0)
    token = tl.load(row_tokens + row).to(tl.int64)
    tl.store(out + token * out_stride + head * out_head_stride + channel, result)


def attend_reference(
    query: Tensor,
    paged: PagedKV,
    block_table: Tensor,
    index: Tensor,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention of one row and KV head over chosen entries, in plain torch.

    query: (H / G, D), the query heads that share the KV head. paged: of that head alone, (blocks,
        1, block_size, D). index: (n,) int64, the entries that are read. soft_cap: of the logits,
        sinks: (H / G,), of these heads; None without.
    Returns: (H / G, D) float32.
    """
    keys = paged.keys_at(block_table, index)[:, 0].float() * key_scale
    values = paged.values_at(block_table, index)[:, 0].float() * value_scale
    logits = capped_reference(query.float() @ keys.T * scale, soft_cap)
    return softmax(logits, sinks) @ values
