"""The rows of a batch that retrieve, as every op of retrieval reads them: at fixed addresses."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

NUM_FIELDS = 4


@dataclass(frozen=True)
class RetrievalRows:
    """Rows on the device, one query token each. A CUDA graph reads what they hold when it replays.

    Attributes:
        tokens: (R,) int32, row of the query and of the output.
        requests: (R,) int32, row of the block table.
        lens: (R,) int32, entries that the row sees, its own included; 0 where it does not retrieve.
        budgets: (R,) int32, units to read.
        offsets: (R,) int64, where its units begin in the scores.
    """

    tokens: Tensor
    requests: Tensor
    lens: Tensor
    budgets: Tensor
    offsets: Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "RetrievalRows":
        """Rows none of which retrieves."""
        fields = torch.zeros(NUM_FIELDS, num_rows, dtype=torch.int32, device=device)
        return cls.of_fields(fields, torch.zeros(num_rows, dtype=torch.int64, device=device))

    @classmethod
    def of_fields(cls, fields: Tensor, offsets: Tensor) -> "RetrievalRows":
        """Rows whose other fields are those of (4, R) `fields`, in order."""
        tokens, requests, lens, budgets = fields
        return cls(tokens, requests, lens, budgets, offsets)

    @classmethod
    def of(
        cls,
        tokens: np.ndarray,
        requests: np.ndarray,
        lens: np.ndarray,
        budgets: np.ndarray,
        unit: int,
        device: torch.device,
    ) -> "RetrievalRows":
        """Rows whose scores follow one another."""
        fields, offsets = pack(tokens, requests, lens, budgets, unit)
        return cls.of_fields(
            async_tensor_h2d(fields, device=device), async_tensor_h2d(offsets, device=device)
        )

    def take_back(self, late: Tensor, floors: Tensor) -> None:
        """Takes off the entries that rows were given too many of, in place.

        late: (B,) int32 by row of the block table. floors: (R,) int32 entries; rows that are left
            with fewer do not retrieve.
        """
        self.lens.sub_(late.index_select(0, self.requests))
        self.lens.masked_fill_(self.lens < floors, 0).clamp_(min=0)

    def first(self, num_rows: int) -> "RetrievalRows":
        """The first rows, at the same addresses."""
        return RetrievalRows(
            *(
                getattr(self, name)[:num_rows]
                for name in ("tokens", "requests", "lens", "budgets", "offsets")
            )
        )


def pack(
    tokens: np.ndarray, requests: np.ndarray, lens: np.ndarray, budgets: np.ndarray, unit: int
) -> tuple[np.ndarray, np.ndarray]:
    """(4, R) int32 fields and (R,) int64 offsets, from (R,) columns; `unit` tokens per unit."""
    fields = np.empty((NUM_FIELDS, len(lens)), dtype=np.int32)
    offsets = np.empty(len(lens), dtype=np.int64)
    fill(fields, offsets, (tokens, requests, lens, budgets), unit)
    return fields, offsets


def fill(
    fields: np.ndarray, offsets: np.ndarray, columns: tuple[np.ndarray, ...], unit: int
) -> None:
    """Writes R rows to the first of (..., 4, N) fields and (..., N) offsets.

    columns: tokens, requests, lens and budgets, (..., R) each or (R,) where all have the same.
    """
    size = columns[0].shape[-1]
    for field, column in enumerate(columns):
        fields[..., field, :size] = column
    offsets[..., :size] = offsets_of(columns[2], unit) if size > 1 else 0


def offsets_of(lens: np.ndarray, unit: int) -> np.ndarray:
    """(..., R) int64 beginnings of rows' scores. Vector loads want multiples of four."""
    room = room_of(lens, unit)
    return np.cumsum(room, axis=-1) - room


def room_of(lens: np.ndarray, unit: int) -> np.ndarray:
    """(..., R) int64 scores that each row takes."""
    units = -(-lens.astype(np.int64) // unit)
    return -(-units // 4) * 4
