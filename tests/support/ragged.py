"""Ragged batches over paged caches in which whatever must not be read is NaN or out of range."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvx.ops.paged import PagedKV

LAYOUTS = ("hnd", "nhd", "layers", "cpu")
# No block has this number: reading a table past its end would not go unnoticed.
NO_BLOCK = 1 << 24


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Memory that torch hands out uninitialised holds NaN or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def offsets_of(counts: Tensor) -> Tensor:
    """Exclusive cumulative sum with the total at the end: (F,) -> (F + 1,) int64."""
    return torch.nn.functional.pad(counts.long().cumsum(0), (1, 0))


@dataclass(frozen=True)
class Batch:
    """F requests of one layer.

    Attributes:
        num_keys, windows: (F,) int32.
        offsets: (F + 1,) int64.
        queries: (F, W, H, D); rows past a request's window are NaN.
        paged: the cache; entries that hold no key are NaN.
        block_tables: (F, max_blocks) int32, `NO_BLOCK` past a request's last block.
    """

    num_keys: Tensor
    windows: Tensor
    offsets: Tensor
    queries: Tensor
    paged: PagedKV
    block_tables: Tensor

    @property
    def max_num_keys(self) -> int:
        return int(self.num_keys.max())

    @property
    def total_keys(self) -> int:
        return int(self.offsets[-1])

    def alone(self, request: int) -> "Batch":
        """One of the requests as a batch of its own."""
        one = slice(request, request + 1)
        return Batch(
            self.num_keys[one],
            self.windows[one],
            offsets_of(self.num_keys[one]),
            self.queries[one],
            self.paged,
            self.block_tables[one],
        )


def empty_cache(
    num_blocks: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    layout: str,
    dtype: torch.dtype,
    device: str,
) -> PagedKV:
    """A cache full of NaN, in the memory order of one of vLLM's attention backends."""
    shape: dict[str, tuple[int, ...]] = {
        "hnd": (num_blocks, kv_heads, block_size, 2 * head_dim),
        "nhd": (num_blocks, block_size, kv_heads, 2 * head_dim),
        "layers": (num_blocks, 3, kv_heads, block_size, 2 * head_dim),
        "cpu": (num_blocks, kv_heads, block_size, 2 * head_dim),
    }
    cache = torch.full(shape[layout], float("nan"), device=device).to(dtype)
    if layout == "nhd":
        cache = cache.transpose(1, 2)
    elif layout == "layers":
        cache = cache[:, 1]
    return PagedKV.of(cache, head_dim, cpu_isa="vec" if layout == "cpu" else None)


def make_sinks(heads: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """(heads,) logits of attention sinks, from far below those of keys to well above them."""
    return torch.linspace(-4.0, 5.0, heads, device=device).to(dtype)


def make_batch(
    seed: int,
    lengths: list[int],
    windows: list[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: str,
    max_window: int | None = None,
    block_size: int = 16,
    layout: str = "hnd",
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> Batch:
    """Normally distributed queries, keys and values, keys in blocks of random order."""
    rng = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=device)

    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    paged = empty_cache(
        num_blocks, kv_heads, block_size, head_dim, layout, cache_dtype or dtype, device
    )
    order = torch.randperm(num_blocks, generator=rng, device=device).int()
    tables = torch.full((len(lengths), max(counts) + 1), NO_BLOCK, device=device).int()
    queries = torch.full(
        (len(lengths), max_window or max(windows), heads, head_dim), float("nan"), device=device
    )
    for f, (length, window, count) in enumerate(zip(lengths, windows, counts, strict=True)):
        tables[f, :count], order = order[:count], order[count:]
        queries[f, :window] = normal(window, heads, head_dim)
        index = torch.arange(length, device=device)
        block, entry = tables[f, index // block_size].long(), index % block_size
        for cache in (paged.keys, paged.values):
            data = normal(length, kv_heads, head_dim).to(cache.dtype)
            raw = torch.uint8 if cache.element_size() == 1 else cache.dtype
            cache.view(raw)[block, :, entry] = data.view(raw)
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Batch(
        sizes,
        torch.tensor(windows, dtype=torch.int32, device=device),
        offsets_of(sizes),
        queries.to(dtype),
        paged,
        tables,
    )


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """NaN counts as equal to itself."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    return torch.equal(ours.contiguous().view(kind), theirs.contiguous().view(kind))
