"""Attention of rows to all of their entries, by the operator that attends to chosen ones.

vLLM's kernel takes 1.6 to 4.7 times as long over 8-bit entries, and FlashAttention does not read
them (docs/notebook/int8-cache.md).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.retrieve import Scratch, retrieve
from vllm_kvx.ops.retrieval.rows import RetrievalRows

# Entries of a unit, a power of two: every unit is chosen. It divides the tiles of ``attend``, none
# of which lies behind a row's end then as a whole.
_SHIFT = 5
UNIT = 1 << _SHIFT


@dataclass(frozen=True)
class AllEntries:
    """What the operator reads and writes besides, at fixed addresses, the same in every layer.

    Attributes:
        tokens: (R,) int32, the numbers from 0 on.
        scratch: that of retrieval, but for `indices`: (R, G, K) int32, every unit's number, one
            list for all rows and heads, and `counts`: (R, G) int32.
    """

    tokens: Tensor
    scratch: Scratch

    @classmethod
    def of(cls, scratch: Scratch, max_len: int) -> "AllEntries":
        """For as many rows as `scratch` is for, with at most `max_len` entries each."""
        counts = torch.zeros_like(scratch.counts)
        units = torch.arange(-(-max_len // UNIT), dtype=torch.int32, device=counts.device)
        # One list in memory, since those of many rows with long contexts would take much.
        indices = units.expand(*counts.shape, -1)
        every = replace(scratch, unit=UNIT, indices=indices, counts=counts, one_launch=None)
        return cls(torch.arange(len(counts), dtype=torch.int32, device=counts.device), every)

    @property
    def kept(self) -> list[Tensor]:
        """What is written once."""
        return [self.tokens, self.scratch.indices[0, 0]]

    def attend(
        self,
        query: Tensor,
        paged: PagedKV,
        block_table: Tensor,
        lens: Tensor,
        out: Tensor,
        *,
        scale: float,
        soft_cap: float | None,
    ) -> None:
        """Writes the attention of each row to its first entries; fit for a CUDA graph.

        Args:
            query, out: (N, H, D) with N >= R; row r is that of row r of the block table.
            block_table: (R, max_blocks) int32.
            lens: (R,) int32, entries that the row sees; of a row with 0, `out` stays as it is.
            scale: of the products. soft_cap: of the logits, above 0; None without.
        """
        count = lens.shape[0]
        tokens, rounded = self.tokens[:count], (lens + (UNIT - 1))[:, None]
        counts = self.scratch.counts[:count]
        torch.bitwise_right_shift(rounded.expand_as(counts), _SHIFT, out=counts)
        # What only a choice is made by stays unread.
        rows = RetrievalRows(tokens, tokens, lens, budgets=tokens, offsets=tokens)
        retrieve(
            query,
            paged,
            None,
            block_table,
            rows,
            self.scratch,
            out,
            scale=scale,
            key_scale=1.0,
            value_scale=1.0,
            soft_cap=soft_cap,
            chosen=True,
        )
