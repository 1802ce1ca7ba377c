"""Stores 8-bit entries and FIER's 1-bit keys by one Triton kernel, which reads a key once.

For ``int8_cache``. The package does it by two: ``ops.int8.store`` and the index's writer.
"""

import triton
import triton.language as tl
from torch import Tensor

from benchmarks.ops.int8_pages import Int8Pages
from vllm_kvx.ops.int8.numbers import LEAST_SCALE, MOST


@triton.jit
def _put_codes(  # type: ignore[no-untyped-def]
    keys,
    codes,
    sidecar,
    GROUP: tl.constexpr,
    D: tl.constexpr,
):
    """1-bit codes of a group's keys (GROUP, D) float32, and its scales and zeros.

    codes, sidecar: where those of the group begin. As ``index_layout`` has it.
    """
    WORDS: tl.constexpr = D // 32
    high = tl.max(keys, axis=0)
    low = tl.min(keys, axis=0)
    zero = (high + low) / 2
    scale = (high - low) / 2
    channel = tl.arange(0, D)
    bit = (keys >= zero[None, :]).to(tl.int32)
    place = 15 - (channel % 32) // 2 + 16 * (channel % 2)
    words = tl.sum(tl.reshape(bit << place[None, :], (GROUP, WORDS, 32)), axis=2)
    at = tl.arange(0, GROUP)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    tl.store(codes + at, words)
    limit = 65504.0
    tl.store(sidecar + channel, tl.minimum(tl.maximum(scale, -limit), limit))
    tl.store(sidecar + D + channel, tl.minimum(tl.maximum(zero, -limit), limit))


@triton.jit
def _quantized(  # type: ignore[no-untyped-def]
    x, MOST: tl.constexpr, LEAST: tl.constexpr
):
    """Rows of float32 as whole numbers, in float32, and their scales."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=1) / MOST, LEAST)
    x = x * (1.0 / scale)[:, None]
    x = tl.where(x >= 0, x + 0.5, x - 0.5)
    return tl.minimum(tl.maximum(x, -MOST - 1), MOST).to(tl.int8), scale


@triton.jit(do_not_specialize=["first"])
def _store_kernel(  # type: ignore[no-untyped-def]
    key,
    value,
    keys,
    values,
    key_scales,
    value_scales,
    codes,
    sidecar,
    table,
    first,
    in_t,
    in_h,
    stride_b,
    stride_h,
    stride_t,
    scale_b,
    scale_h,
    scale_t,
    codes_b,
    codes_h,
    sidecar_b,
    sidecar_h,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.arange(0, GROUP)
    channel = tl.arange(0, D)
    rows = (tl.program_id(1) * GROUP + row).to(tl.int64) * in_t + head * in_h
    begin = (first + tl.program_id(1)) * GROUP
    block = tl.load(table + begin // PAGE).to(tl.int64)
    at = block * stride_b + head * stride_h + (begin % PAGE + row) * stride_t
    at_scale = block * scale_b + head * scale_h + (begin % PAGE + row) * scale_t
    x = tl.load(value + rows[:, None] + channel[None, :]).to(tl.float32)
    numbers, scale = _quantized(x, MOST, LEAST)
    tl.store(values + at[:, None] + channel[None, :], numbers)
    tl.store(value_scales + at_scale, scale)
    x = tl.load(key + rows[:, None] + channel[None, :]).to(tl.float32)
    numbers, scale = _quantized(x, MOST, LEAST)
    tl.store(keys + at[:, None] + channel[None, :], numbers)
    tl.store(key_scales + at_scale, scale)
    codes += block * codes_b + head * codes_h + begin % PAGE * (D // 32)
    sidecar += block * sidecar_b + head * sidecar_h + begin % PAGE // GROUP * (2 * D)
    _put_codes(numbers.to(tl.float32) * scale[:, None], codes, sidecar, GROUP, D)


def store_with_codes(
    pages: Int8Pages, key: Tensor, value: Tensor, table: Tensor, first: int
) -> None:
    """Quantises whole groups of keys and values (n, G, D) and writes them with their 1-bit codes.

    table: (blocks,) int32, the request's. first: the request's group that they begin with. Numbers
    and codes are those that the package's two kernels write. A server's chunk may begin or end
    within a group, which is left to these two.
    """
    shape, codes, scales = pages.sidecar.shape, pages.sidecar.codes, pages.sidecar.scales
    paged = pages.paged
    assert paged.key_scales is not None and paged.value_scales is not None
    _store_kernel[(shape.num_kv_heads, key.shape[0] // shape.group)](
        key,
        value,
        paged.keys,
        paged.values,
        paged.key_scales,
        paged.value_scales,
        codes,
        scales,
        table,
        first,
        *key.stride()[:2],
        *paged.keys.stride()[:3],
        *paged.key_scales.stride(),
        *codes.stride()[:2],
        *scales.stride()[:2],
        PAGE=shape.block_size,
        GROUP=shape.group,
        D=shape.head_dim,
        MOST=MOST,
        LEAST=LEAST_SCALE,
    )
