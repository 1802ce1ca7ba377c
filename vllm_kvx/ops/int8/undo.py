"""Copies a request's 8-bit entries out in order, as 16 bits that any attention reads."""

from torch import Tensor, arange
from vllm.triton_utils import tl, triton

from vllm_kvx.ops.paged import PagedKV

# Tokens that a program undoes.
_TOKENS = 32


def undo(
    paged: PagedKV, block_table: Tensor, first: int, end: int, keys: Tensor, values: Tensor
) -> None:
    """Writes entries [first, end) of one request, n of them, to the beginning of keys and values.

    In Triton on a GPU, in plain torch on a CPU. A long context may be undone by slices. Rows of the
    outputs past n stay as they are.

    Args:
        paged: of 8-bit integers, see ``PagedKV.of_int8``.
        block_table: (blocks,) int32, the request's row of the block table.
        keys, values: (m, G, D) with m >= n, any float dtype, alike in strides, contiguous in D.
    """
    to_torch = paged.keys.device.type == "cpu"
    (undo_in_torch if to_torch else undo_in_triton)(paged, block_table, first, end, keys, values)


def undo_in_torch(
    paged: PagedKV, block_table: Tensor, first: int, end: int, keys: Tensor, values: Tensor
) -> None:
    """The reference of ``undo``."""
    index = arange(first, end, device=paged.keys.device)
    keys[: end - first] = paged.keys_at(block_table, index).to(keys.dtype)
    values[: end - first] = paged.values_at(block_table, index).to(values.dtype)


def undo_in_triton(
    paged: PagedKV, block_table: Tensor, first: int, end: int, keys: Tensor, values: Tensor
) -> None:
    """``undo`` by a kernel, one launch."""
    if end <= first:
        return
    key_scales, value_scales = paged.key_scales, paged.value_scales
    assert key_scales is not None and value_scales is not None
    assert keys.stride() == values.stride() and paged.keys.stride() == paged.values.stride()
    assert key_scales.stride() == value_scales.stride()
    _undo_kernel[(paged.num_heads, triton.cdiv(end - first, _TOKENS))](
        paged.keys,
        paged.values,
        key_scales,
        value_scales,
        block_table,
        keys,
        values,
        first,
        end,
        *paged.keys.stride()[:3],
        *key_scales.stride(),
        *keys.stride()[:2],
        PAGE=paged.block_size,
        D=paged.head_dim,
        TILE=_TOKENS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["first", "end"])
def _undo_kernel(
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
