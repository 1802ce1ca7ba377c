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
