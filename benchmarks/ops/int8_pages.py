"""Pages of 8-bit entries with a scale for each token and KV head; for ``int8_cache``.

An entry is a key and a value of one KV head. Numbers are vLLM's `int8_per_token_head`: the largest
of a head's channels becomes 127. Scales are float32, as vLLM's kernels store and read them; what
bfloat16 scales would save and lose is measured beside it. FIER's 1-bit copy of the keys follows the
entries, as in the pages of a server. There are two layouts:

- `inline`: vLLM's. A head's key, its scale, the value and its scale follow one another, so
  entries begin every 2 D + 8 bytes.
- `apart`: the scales are in the page's tail, behind the 1-bit copy, those of a head side by side.
  Entries begin every 2 D bytes, where a kernel may load 16 bytes at a time.

vLLM's kernels take the strides of entries and of scales, so they serve both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.retrieval_layer import DEVICE, INDEX, Heads, Layer
from vllm_kvx.equations.retrieval import quantize_keys
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.index_layout import Sidecar

LAYOUTS = ("apart", "inline")
SCALE_BYTES = torch.float32.itemsize
MOST = 127.0
# As vLLM's kernel has it: what is all zeros has a scale, too.
LEAST_SCALE = 1e-6
# What a GPU reads at least of where an address points.
SECTOR = 32


def quantized(x: Tensor, scales: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Numbers of 8 bits and their scales, as vLLM's store kernel makes them, in plain torch.

    (..., D) of any float dtype -> (..., D) int8, (...) of the dtype `scales`. Of scales that are
    rounded, numbers are made by the rounded one.
    """
    x = x.float()
    scale = (x.abs().amax(dim=-1) / MOST).clamp(min=LEAST_SCALE).to(scales)
    numbers = x * (1 / scale.float())[..., None]
    # Half away from zero: the conversion to integers truncates.
    numbers = torch.where(numbers >= 0, numbers + 0.5, numbers - 0.5)
    return numbers.clamp(-MOST - 1, MOST).to(torch.int8), scale


def undone(numbers: Tensor, scales: Tensor) -> Tensor:
    """What 8-bit numbers stand for: (..., D) and (...) -> (..., D) float32."""
    return numbers.float() * scales.float()[..., None]


@dataclass(frozen=True)
class Int8Pages:
    """One layer's pages, as strided views of their memory; nothing is copied.

    Attributes:
        keys, values: (blocks, G, block_size, D) int8.
        key_scales, value_scales: (blocks, G, block_size) float32.
        sidecar: the 1-bit keys.
        page_bytes: of a page, all of these.
    """

    layout: str
    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor
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
        floats = raw.view(torch.float32)
        of_page = page // SCALE_BYTES

        def scales(begin: int, head: int, token: int) -> Tensor:
            return torch.as_strided(
                floats, (blocks, heads, size), (of_page, head, token), begin // SCALE_BYTES
            )

        if layout == "inline":
            strides = 2 * side // SCALE_BYTES, heads * 2 * side // SCALE_BYTES
            key_scales, value_scales = scales(dim, *strides), scales(side + dim, *strides)
        else:
            begin = page - heads * size * 2 * SCALE_BYTES
            key_scales, value_scales = (
                scales(begin + i * SCALE_BYTES, 2 * size, 2) for i in range(2)
            )
        return cls(
            layout,
            entries[..., :dim],
            entries[..., side : side + dim],
            key_scales,
            value_scales,
            INDEX.view(entries, shape.page_shape),
            page,
        )

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    def entries(self, table: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The reference of ``int8_cache_triton.undo``: keys and values (n, G, D) float32.

        table: (blocks,) integers, a request's blocks. first, end: its entries.
        """
        index = torch.arange(first, end, device=self.keys.device)
        at = table[index // self.block_size].long(), slice(None), index % self.block_size
        return (
            undone(self.keys[at], self.key_scales[at]),
            undone(self.values[at], self.value_scales[at]),
        )

    def write_codes(self, table: Tensor, first: int, end: int) -> None:
        """The reference of the 1-bit codes: those of the keys that the 8-bit numbers stand for.

        Of groups [first, end) of a request.
        """
        group = self.sidecar.shape.group
        keys, _ = self.entries(table, first * group, end * group)
        signs, scales, zeros = quantize_keys(keys.transpose(0, 1), group)
        self.sidecar.put_scales(table, first, scales, zeros)
        self.sidecar.put_signs(table, first, signs)


def store(pages: Int8Pages, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """vLLM's own kernel: quantises keys and values (n, G, D) and writes them at slots (n,) int64.

    Triton; ``quantized`` is its reference.
    """
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
        triton_reshape_and_cache_flash_per_token_head_quant,
    )
    from vllm.v1.kv_cache_interface import KVQuantMode

    triton_reshape_and_cache_flash_per_token_head_quant(
        key,
        value,
        pages.keys.transpose(1, 2),
        pages.values.transpose(1, 2),
        pages.key_scales.transpose(1, 2),
        pages.value_scales.transpose(1, 2),
        slots,
        KVQuantMode.INT8_PER_TOKEN_HEAD,
    )


def store_in_torch(pages: Int8Pages, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """The reference of ``store``."""
    at = slots // pages.block_size, slice(None), slots % pages.block_size
    pages.keys[at], pages.key_scales[at] = quantized(key)
    pages.values[at], pages.value_scales[at] = quantized(value)


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


def slots_of(table: Tensor, block_size: int, first: int, end: int) -> Tensor:
    """(n,) int64: where entries [first, end) of a request lie. table: (blocks,) integers."""
    index = torch.arange(first, end, device=table.device)
    return table[index // block_size].long() * block_size + index % block_size


def copied(layer: Layer, layout: str, at_once: int = 1024) -> Int8Pages:
    """Pages with the entries of `layer`, at the same places, stored by vLLM's kernel on a GPU.

    at_once: pages.
    """
    shape, paged = layer.shape, layer.paged
    put = store if DEVICE.type == "cuda" else store_in_torch
    blocks = paged.keys.shape[0]
    pages = Int8Pages.empty(shape, blocks, layout)
    for first in range(0, blocks, at_once):
        part = slice(first, first + at_once)
        key, value = (x[part].transpose(1, 2).flatten(0, 1) for x in (paged.keys, paged.values))
        begin = first * shape.block_size
        put(pages, key, value, torch.arange(begin, begin + len(key), device=DEVICE))
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
