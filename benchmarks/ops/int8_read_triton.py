"""Reads 8-bit entries with a scale for each token and KV head, in Triton; for ``int8_cache``.

Either undoes them, which attention of prefill reads then, or attends to chosen ones. The kernels
take the strides of entries and of scales, so they serve every layout of ``int8_pages``.
"""

import triton
import triton.language as tl
from torch import Tensor

from benchmarks.ops.int8_pages import Int8Pages
from vllm_kvx.ops.retrieval.attend import MAX_SPLITS, _combine_kernel
from vllm_kvx.ops.retrieval.rows import RetrievalRows

# Tokens that a program undoes, and that a step of attention takes, as over 16 bits.
_TOKENS, _TILE = 32, 64


@triton.jit(do_not_specialize=["first", "end"])
def _undo_kernel(  # type: ignore[no-untyped-def]
    keys,
    values,
    key_scales,
    value_scales,
    table,
    to_keys,
    to_values,
    first,
    end,
    stride_b,
    stride_h,
    stride_t,
    scale_b,
    scale_h,
    scale_t,
    to_t,
    to_h,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    # Heads of a token lie side by side: programs of one tile run beside one another.
    head = tl.program_id(0)
    token = first + tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = token < end
    channel = tl.arange(0, D)
    block = tl.load(table + token // PAGE, mask=live, other=0).to(tl.int64)
    slot = token % PAGE
    at = (block * stride_b + head * stride_h + slot * stride_t)[:, None] + channel[None, :]
    at_scale = block * scale_b + head * scale_h + slot * scale_t
    to = ((token - first).to(tl.int64) * to_t + head * to_h)[:, None] + channel[None, :]
    x = tl.load(keys + at, mask=live[:, None], other=0).to(tl.float32)
    x *= tl.load(key_scales + at_scale, mask=live, other=0.0)[:, None]
    tl.store(to_keys + to, x.to(to_keys.dtype.element_ty), mask=live[:, None])
    x = tl.load(values + at, mask=live[:, None], other=0).to(tl.float32)
    x *= tl.load(value_scales + at_scale, mask=live, other=0.0)[:, None]
    tl.store(to_values + to, x.to(to_values.dtype.element_ty), mask=live[:, None])


def undo(
    pages: Int8Pages, table: Tensor, first: int, end: int, keys: Tensor, values: Tensor
) -> None:
    """Writes entries [first, end) of a request to the beginning of keys and values (n, G, D).

    table: (blocks,) int32, the request's. keys, values: contiguous, 16 bits on a GPU. The reference
    is ``Int8Pages.entries``.
    """
    if first == end:
        return
    _undo_kernel[(pages.keys.shape[1], triton.cdiv(end - first, _TOKENS))](
        pages.keys,
        pages.values,
        pages.key_scales,
        pages.value_scales,
        table,
        keys,
        values,
        first,
        end,
        *pages.keys.stride()[:3],
        *pages.key_scales.stride(),
        *keys.stride()[:2],
        PAGE=pages.block_size,
        D=keys.shape[2],
        TILE=_TOKENS,
        num_warps=4,
    )


@triton.jit
def _attend_kernel(  # type: ignore[no-untyped-def]
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
    query_stride,
    query_head_stride,
    stride_b,
    stride_h,
    stride_t,
    scale_b,
    scale_h,
    scale_t,
    table_stride,
    max_units,
    splits,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    SHARE: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
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
    chosen = indices + place.to(tl.int64) * max_units
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
    for start in range(begin, end, TILE):
        entry = start + tile
        inside = entry < end
        index = tl.load(chosen + entry // UNIT, mask=inside, other=0) * UNIT + entry % UNIT
        inside = inside & (index < length)
        block = tl.load(table + index // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = index % BLOCK_SIZE
        begins = (block * stride_b + head * stride_h + slot * stride_t)[:, None]
        place_in = begins + channel[None, :]
        key = tl.load(keys + place_in, mask=inside[:, None], other=0).to(q.dtype)
        value = tl.load(values + place_in, mask=inside[:, None], other=0).to(q.dtype)
        of_scale = block * scale_b + head * scale_h + slot * scale_t
        key_scale = tl.load(key_scales + of_scale, mask=inside, other=0.0)
        value_scale = tl.load(value_scales + of_scale, mask=inside, other=0.0)
        # 16 bits hold whole numbers up to 127, so scales are left to the products.
        s = tl.dot(q, tl.trans(key), input_precision="ieee") * (scale * key_scale)[None, :]
        s = tl.where(inside[None, :], s, float("-inf"))
        higher = tl.maximum(peak, tl.max(s, axis=1))
        p = tl.exp(s - higher[:, None])
        fade = tl.exp(peak - higher)
        mass = mass * fade + tl.sum(p, axis=1)
        total = total * fade[:, None]
        p = (p * value_scale[None, :]).to(q.dtype)
        total += tl.dot(p, value, input_precision="ieee")
        peak = higher
    is_head = one < SHARE
    at = (place * SHARE + one).to(tl.int64) * splits + split
    has = mass > 0
    mass = tl.where(has, mass, 1.0)
    lse = tl.where(has, peak + tl.log(mass), float("-inf"))
    tl.store(partial_lse + at, lse, mask=is_head)
    at = partial + at[:, None] * D + channel[None, :]
    tl.store(at, total / mass[:, None], mask=is_head[:, None])


def attend(
    query: Tensor,
    pages: Int8Pages,
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
    splits: int,
) -> None:
    """``vllm_kvx.ops.retrieval.attend.attend`` over 8-bit pages, argument by argument.

    The reference is that one's, over what the numbers stand for.
    """
    heads, dim = query.shape[1:]
    kv_heads, num_rows = pages.keys.shape[1], rows.lens.shape[0]
    share = heads // kv_heads
    assert splits <= MAX_SPLITS, splits
    _attend_kernel[(splits, kv_heads, num_rows)](
        query,
        pages.keys,
        pages.values,
        pages.key_scales,
        pages.value_scales,
        block_table,
        rows.tokens,
        rows.requests,
        rows.lens,
        indices,
        counts,
        partial,
        partial_lse,
        scale,
        *query.stride()[:2],
        *pages.keys.stride()[:3],
        *pages.key_scales.stride(),
        block_table.stride(0),
        indices.shape[2],
        splits,
        BLOCK_SIZE=pages.block_size,
        D=dim,
        SHARE=share,
        PADDED=max(16, triton.next_power_of_2(share)),
        UNIT=unit,
        TILE=_TILE,
        num_warps=4,
    )
    _combine_kernel[(heads, num_rows)](
        rows.tokens,
        rows.lens,
        partial,
        partial_lse,
        out,
        *out.stride()[:2],
        splits,
        None,
        D=dim,
        BLOCK=triton.next_power_of_2(splits),
    )
