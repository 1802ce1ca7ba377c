"""Copies requests' 8-bit entries out in order, as 16 bits that any attention reads."""

from itertools import pairwise

from torch import Tensor, arange
from vllm.triton_utils import tl, triton

from vllm_kvx.ops.paged import PagedKV

# Tokens that a program undoes.
_TOKENS = 32


def undo(
    paged: PagedKV,
    block_table: Tensor,
    first: int,
    ends: Tensor,
    count: int,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Writes entries of n requests to keys and values, each request's behind those before it.

    In Triton on a GPU, in plain torch on a CPU. A long context may be undone by slices. Rows of the
    outputs behind the last entry stay as they are.

    Args:
        paged: of 8-bit integers, see ``PagedKV.of_int8``.
        block_table: (n, blocks) int32, the requests' rows of the block table, contiguous in each.
        first: the entry of every request that it begins with.
        ends: (n + 1,) int32 on the device, contiguous: 0, and where each request's entries end in
            the outputs.
        count: of entries in all, the last of `ends`.
        keys, values: (m, G, D) with m >= count, any float dtype, alike in strides, contiguous in D.
    """
    to_torch = paged.keys.device.type == "cpu"
    by = undo_in_torch if to_torch else undo_in_triton
    by(paged, block_table, first, ends, count, keys, values)


def undo_in_torch(
    paged: PagedKV,
    block_table: Tensor,
    first: int,
    ends: Tensor,
    count: int,
    keys: Tensor,
    values: Tensor,
) -> None:
    """The reference of ``undo``."""
    for table, (begin, end) in zip(block_table, pairwise(ends.tolist()), strict=True):
        index = arange(first, first + end - begin, device=paged.keys.device)
        keys[begin:end] = paged.keys_at(table, index).to(keys.dtype)
        values[begin:end] = paged.values_at(table, index).to(values.dtype)


def undo_in_triton(
    paged: PagedKV,
    block_table: Tensor,
    first: int,
    ends: Tensor,
    count: int,
    keys: Tensor,
    values: Tensor,
) -> None:
    """``undo`` by a kernel, one launch."""
    if not count:
        return
    key_scales, value_scales = paged.key_scales, paged.value_scales
    assert key_scales is not None and value_scales is not None
    assert keys.stride() == values.stride() and paged.keys.stride() == paged.values.stride()
    assert key_scales.stride() == value_scales.stride()
    num_requests = len(block_table)
    # Each request has a last tile that may not be full.
    _undo_kernel[(paged.num_heads, count // _TOKENS + num_requests)](
        paged.keys,
        paged.values,
        key_scales,
        value_scales,
        block_table,
        block_table.stride(0),
        ends,
        num_requests,
        first,
        keys,
        values,
        *paged.keys.stride()[:3],
        *key_scales.stride(),
        *keys.stride()[:2],
        PAGE=paged.block_size,
        D=paged.head_dim,
        TILE=_TOKENS,
        num_warps=4,
    )


# What differs from step to step compiles nothing anew: addresses are those of any row or number.
@triton.jit(do_not_specialize=["tables", "table_stride", "ends", "num_requests", "first"])
def _undo_kernel(
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    table_stride,
    ends,
    num_requests,
    first,
    to_keys,
    to_values,
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
    tile = tl.program_id(1)
    # Tiles of request i begin with ends[i] // TILE + i; of no request there are more than that
    # leaves. The last one that begins here or before:
    request = tl.full((), 0, tl.int32)
    behind = num_requests
    while behind - request > 1:
        middle = (request + behind) // 2
        if tl.load(ends + middle) // TILE + middle <= tile:
            request = middle
        else:
            behind = middle
    begin = tl.load(ends + request)
    own = (tile - begin // TILE - request) * TILE + tl.arange(0, TILE)
    live = own < tl.load(ends + request + 1) - begin
    token = first + own
    channel = tl.arange(0, D)
    table = tables + request.to(tl.int64) * table_stride
    block = tl.load(table + token // PAGE, mask=live, other=0).to(tl.int64)
    slot = token % PAGE
    at = (block * stride_b + head * stride_h + slot * stride_t)[:, None] + channel[None, :]
    at_scale = block * scale_b + head * scale_h + slot * scale_t
    to = ((begin + own).to(tl.int64) * to_t + head * to_h)[:, None] + channel[None, :]
    x = tl.load(keys + at, mask=live[:, None], other=0).to(tl.float32)
    x *= tl.load(key_scales + at_scale, mask=live, other=0.0)[:, None]
    tl.store(to_keys + to, x.to(to_keys.dtype.element_ty), mask=live[:, None])
    x = tl.load(values + at, mask=live[:, None], other=0).to(tl.float32)
    x *= tl.load(value_scales + at_scale, mask=live, other=0.0)[:, None]
    tl.store(to_values + to, x.to(to_values.dtype.element_ty), mask=live[:, None])
