"""Ways to run attention of prefill over chosen blocks of keys; for ``sparse_prefill``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.prefill_blocks import Setting, causal_blocks
from benchmarks.ops.sparse_prefill_triton import Tiles, attend_blocks, listed
from vllm_kvx.ops.paged import PagedKV

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
BLOCK = 128
Call = Callable[[], Any]


@dataclass(frozen=True)
class Part:
    """What a chunk's queries read. rows: their positions. chosen, counts: see `listed`.

    read, causal: blocks that are read, and that causal attention would read.
    """

    rows: slice
    chosen: Tensor
    counts: Tensor
    read: int
    causal: int


class Layer:
    """One request's queries and paged cache.

    query: (N, H, D). paged: its entries, `table` (pages,) int32 in random order.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, length: int, page: int) -> None:
        self.length, self.page, self.scaling = length, page, dim**-0.5
        pages = -(-length // page)
        # As FlashAttention's cache lies in memory: the heads of an entry side by side.
        cache = torch.randn(pages, page, kv_heads, 2 * dim, dtype=DTYPE, device=DEVICE)
        self.paged = PagedKV.of(cache.transpose(1, 2), dim)
        self.table = torch.randperm(pages, device=DEVICE).int()
        self.query = torch.randn(length, heads, dim, dtype=DTYPE, device=DEVICE)
        self.out = torch.empty_like(self.query)

    @property
    def kv_heads(self) -> int:
        return self.paged.num_heads

    def chunks(self, size: int) -> Iterator[tuple[int, int]]:
        for first in range(0, self.length, size):
            yield first, min(first + size, self.length)


def random_reads(layer: Layer, first: int, end: int, share: float) -> Tensor:
    """(G, Q, K) bool: of the blocks that each block of queries sees, the share, rounded up.

    The first and the queries' own are among them, so the least is two.
    """
    blocks, seen = -(-(end - first) // BLOCK), -(-end // BLOCK)
    own = first // BLOCK + torch.arange(blocks, device=DEVICE)[:, None]
    index = torch.arange(seen, device=DEVICE)
    chance = torch.rand(layer.kv_heads, blocks, seen, device=DEVICE)
    chance.masked_fill_((index == 0) | (index == own), 2).masked_fill_(index > own, -1)
    counts = (share * (own + 1)).ceil().clamp(min=2).long().minimum(own + 1)
    return chance.argsort(dim=-1, descending=True).argsort(dim=-1) < counts


def flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    starts: Tensor,
    lens: Tensor,
    longest: tuple[int, int],
    out: Tensor,
    splits: int = 1,
) -> None:
    """vLLM's paged FlashAttention 3; on a CPU, for the dry run, what it computes.

    query, out: (rows, H, D), sequences one after the other, from `starts` (S + 1,) int32.
    keys, values: (pages, page, G, D). table: (S, pages) int32. lens: (S,) int32, keys of each
    sequence; the last query sees all of them. longest: the most queries and keys of a sequence.
    splits: parts of a sequence's keys; 0 leaves them to FlashAttention, as vLLM does.
    """
    scaling = query.shape[-1] ** -0.5
    if not ON_GPU:
        for s, length in enumerate(lens.tolist()):
            rows = slice(int(starts[s]), int(starts[s + 1]))
            tokens = torch.arange(length)
            pages = table[s, tokens // keys.shape[1]].long()
            k, v = (x[pages, tokens % keys.shape[1]].transpose(0, 1) for x in (keys, values))
            q = query[rows].transpose(0, 1)
            k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
            own = length - q.shape[1] + torch.arange(q.shape[1])[:, None]
            logits = (q @ k.mT * scaling).masked_fill(tokens > own, -torch.inf)
            out[rows] = (logits.softmax(dim=-1) @ v).transpose(0, 1)
        return
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        out=out,
        cu_seqlens_q=starts,
        max_seqlen_q=longest[0],
        seqused_k=lens,
        max_seqlen_k=longest[1],
        softmax_scale=scaling,
        causal=True,
        block_table=table,
        num_splits=splits,
        fa_version=3,
    )


def dense(layer: Layer, size: int) -> Call:
    """All chunks of `size` queries, as vLLM calls it."""
    keys, values = (x.transpose(1, 2) for x in (layer.paged.keys, layer.paged.values))
    parts = [
        (slice(first, end), _int([0, end - first]), _int([end]), (end - first, end))
        for first, end in layer.chunks(size)
    ]

    def run() -> None:
        for rows, starts, lens, longest in parts:
            query, out = layer.query[rows], layer.out[rows]
            flash(query, keys, values, layer.table[None], starts, lens, longest, out, splits=0)

    return run


def tables_of(layer: Layer, chosen: Tensor, one: bool) -> Tensor:
    """(G, Q, pages) int32: the pages of lists (G, Q, most) of blocks.

    one: as pages of `overlapping`.
    """
    each = BLOCK // layer.page
    index = (chosen[..., None] * each + torch.arange(each, device=DEVICE)).flatten(2)
    # A last block may have fewer pages; they are not read.
    pages = layer.table[index.clamp_(max=len(layer.table) - 1)]
    if one:
        keys = layer.paged.keys
        heads = torch.arange(layer.kv_heads, device=DEVICE, dtype=torch.int32)
        pages = pages * (keys.stride(0) // keys.stride(1)) + heads[:, None, None]
    return pages


def overlapping(cache: Tensor) -> Tensor:
    """Keys or values (blocks, G, page, D) as (n, page, 1, D): one head's pages, which overlap.

    That of block b and head g is the one with number b * (stride of blocks / stride of heads) + g.
    """
    blocks, heads, page, dim = cache.shape
    step = cache.stride(1)
    assert cache.stride(0) % step == 0, "a block's bytes are no multiple of an entry's"
    count = (blocks - 1) * (cache.stride(0) // step) + heads
    shape, strides = (count, page, 1, dim), (step, cache.stride(2), step, 1)
    return cache.as_strided(shape, strides, cache.storage_offset())


def sparse_flash(layer: Layer, parts: list[Part], one: bool) -> Call:
    """FlashAttention over the blocks that are read; tables are made before."""
    kv_heads = layer.kv_heads
    each = layer.query.shape[1] // kv_heads
    prepared: list[tuple[Any, ...]] = []
    for part in parts:
        rows, tables = part.rows, tables_of(layer, part.chosen, one)
        count = rows.stop - rows.start
        begins = torch.arange(0, count, BLOCK, device=DEVICE)
        own = (count - begins).clamp(max=BLOCK)
        lens = ((part.counts - 1) * BLOCK + own).int()
        longest = BLOCK, int(lens.max())
        if one:
            heads = torch.arange(kv_heads, device=DEVICE)[:, None] * count
            starts = torch.cat([(heads + begins).flatten(), _int([kv_heads * count])]).int()
            prepared.append((rows, tables.flatten(0, 1), lens.flatten(), starts, longest))
        else:
            starts = torch.cat([begins, _int([count])]).int()
            prepared.append((rows, tables, lens, starts, longest))
    of_heads = [x.transpose(1, 2) for x in (layer.paged.keys, layer.paged.values)]
    of_one = [overlapping(x) for x in (layer.paged.keys, layer.paged.values)]

    def run_heads() -> None:
        keys, values = of_heads
        for rows, tables, lens, starts, longest in prepared:
            for g in range(kv_heads):
                mine = slice(g * each, (g + 1) * each)
                query, out = layer.query[rows, mine], layer.out[rows, mine]
                k, v = keys[:, :, g : g + 1], values[:, :, g : g + 1]
                flash(query, k, v, tables[g], starts, lens[g], longest, out)

    def run_one() -> None:
        for rows, tables, lens, starts, longest in prepared:
            query = layer.query[rows].unflatten(1, (kv_heads, each)).transpose(0, 1)
            query = query.flatten(0, 1)  # A copy.
            out = torch.empty_like(query)
            flash(query, of_one[0], of_one[1], tables, starts, lens, longest, out)
            back = out.unflatten(0, (kv_heads, -1)).transpose(0, 1)
            layer.out[rows].unflatten(1, (kv_heads, each)).copy_(back)

    return run_one if one else run_heads


def sparse_triton(layer: Layer, parts: list[Part], tiles: Tiles) -> Call:
    """The Triton kernel over the blocks that are read."""

    def run() -> None:
        for part in parts:
            rows = part.rows
            attend_blocks(
                layer.query[rows],
                layer.paged,
                layer.table,
                part.chosen,
                part.counts,
                rows.start,
                BLOCK,
                tiles,
                layer.out[rows],
            )

    return run


def parts_of(layer: Layer, size: int, share: float) -> list[Part]:
    """The chunks of `size` queries, each with random blocks of this share."""
    parts = []
    for first, end in layer.chunks(size):
        reads = random_reads(layer, first, end, share)
        counts = causal_blocks(reads, first, end, Setting("dense"))
        parts.append(Part(slice(first, end), *listed(reads), *counts))
    return parts


def _int(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
