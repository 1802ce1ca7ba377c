"""Pages of 8-bit entries with a scale for each token and KV head; for ``int8_cache``.

An entry is a key and a value of one KV head. Numbers are vLLM's `int8_per_token_head`, see
``vllm_kvx.ops.int8``. Scales are float32, as vLLM's kernels store and read them; what bfloat16
scales would save and lose is measured beside it. FIER's 1-bit copy of the keys follows the entries,
as in the pages of a server. There are two layouts:

- `inline`: vLLM's. A head's key, its scale, the value and its scale follow one another, so
  entries begin every 2 D + 8 bytes.
- `apart`: the package's. The scales are in the page's tail, behind the 1-bit copy. Entries begin
  every 2 D bytes, where a kernel may load 16 bytes at a time.

Triton kernels, vLLM's and ours, take the strides of entries and of scales, so they serve both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.retrieval_layer import DEVICE, INDEX, Call, Heads, Layer
from vllm_kvx.ops.int8.layout import SCALE_BYTES
from vllm_kvx.ops.int8.store import store
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.index_layout import Sidecar

LAYOUTS = ("apart", "inline")
# What a GPU reads at least of where an address points.
SECTOR = 32


@dataclass(frozen=True)
class Int8Pages:
    """One layer's pages, as strided views of their memory; nothing is copied.

    Attributes:
        paged: the entries with their scales.
        sidecar: the 1-bit keys.
        page_bytes: of a page, all of these.
    """

    layout: str
    paged: PagedKV
    sidecar: Sidecar
    page_bytes: int

    @classmethod
    def empty(cls, shape: Heads, blocks: int, layout: str) -> "Int8Pages":
        """Pages of zeros."""
        page = page_bytes(shape, layout)
        heads, size, dim = shape.kv_heads, shape.block_size, shape.head_dim
        side = dim + SCALE_BYTES if layout == "inline" else dim
        raw = torch.zeros(blocks * page, dtype=torch.int8, device=DEVICE)
        # As vLLM's attention backends lay out 16 bits: the heads of a token side by side.
        entries = torch.as_strided(
            raw, (blocks, heads, size, 2 * side), (page, 2 * side, heads * 2 * side, 1)
        )
        sidecar = INDEX.view(entries, shape.page_shape)
        if layout == "apart":
            paged = PagedKV.of_int8(entries, dim, INDEX.page_bytes(shape.page_shape))
            return cls(layout, paged, sidecar, page)
        strides = page, 2 * side, heads * 2 * side
        key_scales, value_scales = (
            torch.as_strided(
                raw.view(torch.float32),
                (blocks, heads, size),
                [stride // SCALE_BYTES for stride in strides],
                begin // SCALE_BYTES,
            )
            for begin in (dim, side + dim)
        )
        keys, values = entries[..., :dim], entries[..., side : side + dim]
        return cls(layout, PagedKV(keys, values, key_scales, value_scales), sidecar, page)


def stored_16_bits(paged: PagedKV, key: Tensor, value: Tensor, slots: Tensor) -> Callable[[], None]:
    """What writes keys and values (n, G, D) as they are, as vLLM's FlashAttention backend does.

    paged: pages of the same dtype. Without a GPU plain torch stands for vLLM's kernel.
    """
    keys, values = paged.keys.transpose(1, 2), paged.values.transpose(1, 2)
    if DEVICE.type != "cuda":
        blocks, places = slots // paged.block_size, slots % paged.block_size

        def run() -> None:
            keys[blocks, places], values[blocks, places] = key, value

        return run
    from vllm._custom_ops import reshape_and_cache_flash

    one = torch.ones(1, device=DEVICE)
    return partial(reshape_and_cache_flash, key, value, keys, values, slots, "auto", one, one)


def code_writer(pages: Int8Pages, table: Tensor, first: int, end: int) -> Call:
    """What writes the 1-bit keys of groups [first, end) of a request, as a server does.

    table: (blocks,) int32, the request's.
    """
    group = torch.arange(first, end, dtype=torch.int32, device=DEVICE)
    nothing = torch.zeros_like(group)
    jobs = torch.stack([nothing, nothing, group], dim=1)
    address = torch.tensor([table.data_ptr()], dtype=torch.int64, device=DEVICE).view(torch.uint64)
    strides = torch.tensor([table.stride(0)], device=DEVICE)
    writer = INDEX.writer([(pages.paged, pages.sidecar)], [0], [0])
    return partial(writer.write, jobs, address, strides)


def slots_of(table: Tensor, block_size: int, first: int, end: int) -> Tensor:
    """(n,) int64: where entries [first, end) of a request lie. table: (blocks,) integers."""
    index = torch.arange(first, end, device=table.device)
    return table[index // block_size].long() * block_size + index % block_size


def copied(layer: Layer, layout: str, at_once: int = 1024) -> Int8Pages:
    """Pages with the entries of `layer`, at the same places, stored by vLLM's kernel on a GPU.

    at_once: pages.
    """
    shape, paged = layer.shape, layer.paged
    blocks = paged.keys.shape[0]
    pages = Int8Pages.empty(shape, blocks, layout)
    for first in range(0, blocks, at_once):
        part = slice(first, first + at_once)
        key, value = (x[part].transpose(1, 2).flatten(0, 1) for x in (paged.keys, paged.values))
        begin = first * shape.block_size
        store(pages.paged, key, value, torch.arange(begin, begin + len(key), device=DEVICE))
    return pages


def page_bytes(shape: Heads, layout: str) -> int:
    """Bytes of a page with its scales and 1-bit keys: the same in both layouts."""
    assert layout in LAYOUTS, layout
    entries = shape.kv_heads * shape.block_size * entry_bytes(shape.head_dim)
    return entries + INDEX.page_bytes(shape.page_shape)


def entry_bytes(dim: int, scale: int = SCALE_BYTES) -> int:
    """Of an entry in 8 bits, with its two scales."""
    return 2 * (dim + scale)


def sectors_of_an_entry(shape: Heads, layout: str) -> float:
    """Bytes that reading one entry moves, in whole sectors, averaged over a page's entries."""
    if layout == "16 bits":
        return float(-(-4 * shape.head_dim // SECTOR) * SECTOR)
    if layout == "apart":  # And two scales, which are in one sector.
        return float(-(-2 * shape.head_dim // SECTOR) * SECTOR + SECTOR)
    size, count = entry_bytes(shape.head_dim), shape.kv_heads * shape.block_size
    moved = ((i * size + size - 1) // SECTOR - i * size // SECTOR + 1 for i in range(count))
    return SECTOR * sum(moved) / count


def token_bytes(shape: Heads) -> dict[str, dict[str, float]]:
    """Bytes of a token in one layer, by layout; how many more tokens a pool of these bytes holds.

    more_than_stock, more_than_fier: over 16 bits alone, and with FIER's 1-bit keys. Two of 32
    layers in 16 bits: pages of a pool have one size, so that the other layers' pages would take
    more tokens; here bytes alone count.
    """
    dim, heads = shape.head_dim, shape.kv_heads
    sidecar = INDEX.page_bytes(shape.page_shape) / shape.block_size
    stock = float(heads * 4 * dim)
    fp32, bf16 = (float(heads * entry_bytes(dim, scale)) for scale in (SCALE_BYTES, 2))
    found = {
        "16 bits": stock,
        "16 bits, 1-bit keys": stock + sidecar,
        "fp8, 1-bit keys": stock / 2 + sidecar,
        "int8, fp32 scales": fp32,
        "int8, fp32 scales, 1-bit keys": fp32 + sidecar,
        "int8, bf16 scales, 1-bit keys": bf16 + sidecar,
        "int8, fp32 scales, 1-bit keys, two of 32 layers in 16 bits": (
            (30 * (fp32 + sidecar) + 2 * stock) / 32
        ),
    }
    return {
        name: {
            "bytes": size,
            "more_than_stock": round(stock / size, 4),
            "more_than_fier": round((stock + sidecar) / size, 4),
        }
        for name, size in found.items()
    }
