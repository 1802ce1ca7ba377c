"""Ways to attend in a decode step over 8-bit pages, and over 16 bits; for ``int8_cache``."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.ops.int8_pages import (
    LAYOUTS,
    copied,
    entry_bytes,
    sectors_of_an_entry,
)
from benchmarks.ops.int8_unified import unified
from benchmarks.ops.retrieval_layer import (
    DEVICE,
    DTYPE,
    Call,
    Decode,
    Heads,
    Layer,
    scratch_of,
    stock_attention,
)
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval import retrieve
from vllm_kvx.ops.retrieval.attend import MAX_SPLITS, attend
from vllm_kvx.ops.retrieval.rows import RetrievalRows


class Step:
    """A decode step's attention in `layers` layers, for `batch` requests of `length` entries each.

    tables: (layers, batch, blocks) int32, in one cache: what a layer reads, no other one has left
    in L2. selections: chosen entries, as many as a GPU's L2 does not hold.
    """

    def __init__(
        self,
        shape: Heads,
        length: int,
        batch: int,
        layers: int,
        layouts: tuple[str, ...] = LAYOUTS,
    ) -> None:
        self.shape, self.length, self.batch = shape, length, batch
        self.layer = Layer(shape, length, batch * layers)
        self.pages = {layout: copied(self.layer, layout) for layout in layouts}
        self.tables = self.layer.table.unflatten(0, (layers, batch))
        self.query = torch.randn(batch, shape.heads, shape.head_dim, dtype=DTYPE, device=DEVICE)
        self.out = torch.empty_like(self.query)
        index, every = np.arange(batch), np.full(batch, length)
        self.rows = RetrievalRows.of(index, index, every, every, 1, DEVICE)
        parts = batch * shape.heads * MAX_SPLITS
        self.partial = torch.zeros(parts * shape.head_dim, dtype=torch.float32, device=DEVICE)
        self.partial_lse = torch.zeros(parts, dtype=torch.float32, device=DEVICE)

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    def selections(self, budget: int, count: int) -> list[Tensor]:
        """`count` times (batch, G, budget) int32: random entries, ascending."""
        return [self._selected(budget) for _ in range(count)]

    def _selected(self, budget: int) -> Tensor:
        chance = torch.rand(self.batch, self.shape.kv_heads, self.length, device=DEVICE)
        return chance.topk(budget, dim=-1).indices.sort(dim=-1).values.int().contiguous()

    def counts(self, count: int) -> Tensor:
        size = self.batch, self.shape.kv_heads
        return torch.full(size, count, dtype=torch.int32, device=DEVICE)

    def _call(
        self,
        layout: str,
        table: Tensor,
        indices: Tensor,
        unit: int,
        programs: int,
    ) -> Call:
        splits = retrieve.splits_of(programs, self.batch, self.shape.kv_heads, MAX_SPLITS)
        parts = self.batch, self.shape.heads, splits
        count, dim = self.batch * self.shape.heads * splits, self.shape.head_dim
        return partial(
            attend,
            self.query,
            self.paged(layout),
            table,
            self.rows,
            indices,
            self.counts(indices.shape[2]),
            self.partial[: count * dim].view(*parts, dim),
            self.partial_lse[:count].view(parts),
            self.out,
            unit=unit,
            scale=self.scale,
            key_scale=1.0,
            value_scale=1.0,
            splits=splits,
        )

    def paged(self, layout: str) -> PagedKV:
        """layout: `16 bits`, or that of 8."""
        return self.layer.paged if layout == "16 bits" else self.pages[layout].paged

    def chosen(self, layout: str, table: Tensor, indices: Tensor, programs: int) -> Call:
        """Our Triton attention over chosen entries. layout: see `paged`."""
        return self._call(layout, table, indices, 1, programs)

    def in_cuda(self, layout: str, units: int, unit: int = 1) -> Callable[[Tensor, Tensor], Call]:
        """The CUDA op over so many chosen units of `unit` entries: by table and indices.

        layout: see `paged`; not `inline`.

        Raises:
            ValueError: the ops are not built, or do not run here.
        """
        capacity = self.batch * (self.length + 4)
        scratch = scratch_of(self.shape, "cuda", self.batch, capacity, units)
        scratch, counts = replace(scratch, unit=unit), self.counts(units)

        def call(table: Tensor, indices: Tensor) -> Call:
            steps = retrieve.steps(
                self.query,
                self.paged(layout),
                self.layer.sidecar,
                table,
                self.rows,
                replace(scratch, indices=indices, counts=counts),
                self.out,
                scale=self.scale,
                key_scale=1.0,
                value_scale=1.0,
                chosen=True,
            )
            return steps["attend"]

        return call

    def stock(self, table: Tensor) -> Call:
        """FlashAttention 3 over all entries in 16 bits, as vLLM calls it in a decode step."""
        return stock_attention(Decode(self.layer, table, self.length, 1, self.batch))

    def all_of(self, layout: str, table: Tensor, programs: int) -> Call:
        """Our Triton attention over all entries: every block is chosen."""
        return self._call(layout, table, self.blocks, self.shape.block_size, programs)

    def all_in_cuda(self, layout: str, table: Tensor) -> Call:
        """The CUDA op over all entries; see `in_cuda`."""
        blocks = self.blocks
        return self.in_cuda(layout, blocks.shape[2], self.shape.block_size)(table, blocks)

    @property
    def blocks(self) -> Tensor:
        """(batch, G, blocks) int32: all of them."""
        count = self.tables.shape[2]
        blocks = torch.arange(count, dtype=torch.int32, device=DEVICE)
        return blocks.expand(self.batch, self.shape.kv_heads, -1).contiguous()

    def unified(self, layout: str, table: Tensor) -> Call:
        """vLLM's Triton attention over all entries. layout: see `paged`."""
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=DEVICE)
        where = starts, self.rows.lens, (1, self.length), self.out
        return unified(self.query, self.paged(layout), table, *where)

    def bytes_of(self, layout: str, entries: int) -> tuple[float, float]:
        """Bytes of so many entries a request and KV head; and in whole sectors, each on its own.

        Where all entries are read, neighbours share sectors, and the first is what moves.
        """
        heads = self.batch * self.shape.kv_heads * entries
        small = entry_bytes(self.shape.head_dim)
        each = self.layer.entry_bytes if layout == "16 bits" else small
        return float(heads * each), heads * sectors_of_an_entry(self.shape, layout)
