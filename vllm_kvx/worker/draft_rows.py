"""Passes of one row for each of some requests, after a step's own: what all that draft share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_kvx.worker.attn_metadata import StepAttention
from vllm_kvx.worker.batch import PassBatch
from vllm_kvx.worker.decode.draft_pass import DraftReads
from vllm_kvx.worker.prefill.score_and_move import PassWork


def slots_of(positions: Tensor, tables: Sequence[Tensor], block_sizes: Sequence[int]) -> Tensor:
    """(G, P) int64 slots of (P,) int64 positions, one of each row of the block tables.

    tables: (P, B) int32 by KV group. block_sizes: tokens of a block, by KV group.
    """
    return torch.stack(
        [
            table.gather(1, (positions // size)[:, None])[:, 0].long() * size + positions % size
            for table, size in zip(tables, block_sizes, strict=True)
        ]
    )


@dataclass(frozen=True)
class RowPass:
    """One row of each of P requests, whose entries take slots that are theirs.

    Attributes:
        attn: of the step that the pass follows.
        batch: the pass, with places in the step's batch, positions, block tables and slots.
        lens: (P,) int32 entries that each row sees, its own included.
        bounds: (P,) int32, as many or more, on the host.
        work: for prompts, beside the layers' attention.
        reads: what the rows retrieve; None where they see all entries.
    """

    attn: StepAttention
    batch: PassBatch
    lens: Tensor
    bounds: np.ndarray
    work: PassWork | None = None
    reads: DraftReads | None = None

    @property
    def num_rows(self) -> int:
        return len(self.bounds)


@dataclass(frozen=True)
class Bounds:
    """Tokens whose entries count, of each request that drafts.

    Attributes:
        least, most: (P,) int64, known on the host. now: (P,) int64, the number, on the device.
    """

    least: np.ndarray
    most: np.ndarray
    now: Tensor

    def after(self, tokens: int, limit: int) -> "Bounds":
        """The same after so many more tokens, and no more than `limit`."""
        return Bounds(
            np.minimum(self.least + tokens, limit),
            np.minimum(self.most + tokens, limit),
            (self.now + tokens).clamp(max=limit),
        )


@dataclass(frozen=True)
class DraftRows:
    """The rows of a step's requests that draft, in as many passes as they draft tokens.

    Attributes:
        attn: of the step.
        places, requests: (P,) int64 places in the step's batch, and request states.
        tables: (P, B) int32 by KV group. block_sizes: tokens of a block, by KV group.
        seen: what counts before the first pass.
        count: passes. limit: tokens of the longest context. budget: units that a row reads.
    """

    attn: StepAttention
    places: np.ndarray
    requests: np.ndarray
    tables: tuple[Tensor, ...]
    block_sizes: Sequence[int]
    seen: Bounds
    count: int
    limit: int
    budget: int

    def row_pass(self, number: int) -> RowPass:
        """One of the passes, by its number."""
        return self._pass(number, number)

    @property
    def whole(self) -> RowPass:
        """The first pass, with the bounds and the groups of the index of all of them."""
        return self._pass(0, self.count - 1)

    def _pass(self, number: int, last: int) -> RowPass:
        seen = self.seen.after(number + 1, self.limit)
        most = np.minimum(self.seen.most + last + 1, self.limit)
        # Behind the longest context there is no slot: its last one is nobody's any more.
        positions = seen.now - 1
        slots = slots_of(positions, self.tables, self.block_sizes)
        ones = np.ones(len(self.places), dtype=np.int32)
        batch = PassBatch(self.places, ones, positions, self.tables, slots)
        reads = DraftReads(self.requests, seen.least, most, self.budget)
        return RowPass(self.attn, batch, seen.now.int(), most.astype(np.int32), reads=reads)
