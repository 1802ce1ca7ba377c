"""Ways to attend in a decode step over 8-bit pages, and over 16 bits; for ``int8_cache``."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.ops.int8_pages import (
    LAYOUTS,
    copied,
    entry_bytes,
    sectors_of_an_entry,
)
from benchmarks.ops.int8_read_triton import attend
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
from vllm_kvx.ops.retrieval import retrieve
from vllm_kvx.ops.retrieval.attend import MAX_SPLITS
from vllm_kvx.ops.retrieval.attend import attend as attend_16_bits
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
        op: Callable[..., None],
        of: Any,
        table: Tensor,
        indices: Tensor,
        unit: int,
        programs: int,
        **scales: float,
    ) -> Call:
        splits = retrieve.splits_of(programs, self.batch, self.shape.kv_heads, MAX_SPLITS)
        parts = self.batch, self.shape.heads, splits
        count, dim = self.batch * self.shape.heads * splits, self.shape.head_dim
        return partial(
            op,
            self.query,
            of,
            table,
            self.rows,
            indices,
            self.counts(indices.shape[2]),
            self.partial[: count * dim].view(*parts, dim),
            self.partial_lse[:count].view(parts),
            self.out,
            unit=unit,
            scale=self.scale,
            splits=splits,
            **scales,
        )

    def chosen_16_bits(self, table: Tensor, indices: Tensor, programs: int) -> Call:
        """Our Triton attention over chosen entries in 16 bits."""
        scales = {"key_scale": 1.0, "value_scale": 1.0}
        return self._call(attend_16_bits, self.layer.paged, table, indices, 1, programs, **scales)

    def chosen(self, layout: str, table: Tensor, indices: Tensor, programs: int) -> Call:
        """The same over 8 bits."""
        return self._call(attend, self.pages[layout], table, indices, 1, programs)

    def in_cuda(self, budget: int) -> Callable[[Tensor, Tensor], Call]:
        """The CUDA op over chosen entries in 16 bits: by table and indices.

        Raises:
            ValueError: the ops are not built, or do not run here.
        """
        capacity = self.batch * (self.length + 4)
        scratch = scratch_of(self.shape, "cuda", self.batch, capacity, budget)
        counts = self.counts(budget)

        def call(table: Tensor, indices: Tensor) -> Call:
            steps = retrieve.steps(
                self.query,
                self.layer.paged,
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
        """Our Triton attention over all entries in 8 bits: every block is chosen."""
        blocks = torch.arange(table.shape[1], dtype=torch.int32, device=DEVICE)
        indices = blocks.expand(self.batch, self.shape.kv_heads, -1).contiguous()
        pages = self.pages[layout]
        return self._call(attend, pages, table, indices, pages.block_size, programs)

    def unified(self, layout: str, table: Tensor) -> Call:
        """vLLM's Triton attention over all entries. layout: `16 bits`, or that of 8."""
        of = self.layer.paged if layout == "16 bits" else self.pages[layout]
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=DEVICE)
        longest = 1, self.length
        return unified(self.query, of, table, starts, self.rows.lens, longest, self.out)

    def bytes_of(self, layout: str, entries: int) -> tuple[float, float]:
        """Bytes of so many entries a request and KV head; and in whole sectors, each on its own.

        Where all entries are read, neighbours share sectors, and the first is what moves.
        """
        heads = self.batch * self.shape.kv_heads * entries
        small = entry_bytes(self.shape.head_dim)
        each = self.layer.entry_bytes if layout == "16 bits" else small
        return float(heads * each), heads * sectors_of_an_entry(self.shape, layout)
