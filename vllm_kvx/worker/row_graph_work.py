"""What CUDA graphs of passes do beside attention: all that they read is at fixed addresses."""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.rows import RetrievalRows, pack
from vllm_kvx.worker.decode.draft_pass import DraftReads
from vllm_kvx.worker.decode.retrieval import Retrieval
from vllm_kvx.worker.decode.step import Mode, RetrievalPass
from vllm_kvx.worker.draft_rows import RowPass
from vllm_kvx.worker.layer_hooks import LayerWork
from vllm_kvx.worker.prefill.score_and_move import PrefillBuffers, ScoredLayer


class GraphWork(Protocol):
    """The work of one kind of pass. A graph has `size` rows, of which a pass has P or fewer.

    most_rows: that a pass may have.
    """

    most_rows: int

    def takes(self, now: RowPass, size: int) -> bool:
        """Whether a graph does what `now` has to do; known on the host."""

    def set(self, now: RowPass | None, size: int) -> None:
        """Writes what the graph is about to read. None while it is captured: it does nothing."""

    def beside(
        self, size: int, tables: tuple[Tensor, ...]
    ) -> tuple[LayerWork | None, RetrievalPass | None]:
        """What hooks do while a graph is captured. tables: (size, B) int32 by KV group."""


class KeptQueries:
    """Passes over all entries that keep their rows' queries, for the pass that scores by them.

    Rows that a graph has and a pass has not keep the query of its first row, where that one does.
    """

    def __init__(self, memory: PrefillBuffers) -> None:
        self._memory, self.most_rows = memory, memory.queries.shape[0]
        self._count = torch.arange(self.most_rows, device=memory.device)
        # Rows of the pass, slots and places: see ``WindowRows``.
        self._at = torch.zeros(3, self.most_rows, dtype=torch.int64, device=memory.device)

    def takes(self, now: RowPass, size: int) -> bool:
        return now.work is not None and now.work.only_keeps

    def set(self, now: RowPass | None, size: int) -> None:
        at = self._at[:, :size]
        if now is None:
            at.zero_()
            return
        assert now.work is not None and now.work.windows is not None
        windows, (rows, slots, places) = now.work.windows, at
        torch.mul(self._count[:size], self._count[:size] < now.num_rows, out=rows)
        torch.index_select(windows.slots, 0, rows, out=slots)
        torch.index_select(windows.places, 0, rows, out=places)

    def beside(self, size: int, tables: tuple[Tensor, ...]) -> tuple[LayerWork, None]:
        return _KeepsQueries(self._memory.queries, *self._at[:, :size]), None


class _KeepsQueries:
    """Of `rows`, (n,) int64, queries go to `slots` and `places` of (slots, L, W, H, D)."""

    def __init__(self, queries: Tensor, rows: Tensor, slots: Tensor, places: Tensor) -> None:
        self._queries, self._rows, self._slots, self._places = queries, rows, slots, places

    def run(self, hook: ScoredLayer, query: Tensor, paged: PagedKV) -> None:
        kept = query.index_select(0, self._rows)
        self._queries[:, hook.place].index_put_((self._slots, self._places), kept)


class GraphReads:
    """Passes all of whose rows retrieve, of a server with one KV stage.

    Groups of the index that drafts may have filled are written beside each layer, as many as there
    is room for.
    """

    def __init__(self, retrieval: Retrieval, most_rows: int, num_drafts: int, device: Any) -> None:
        """num_drafts: the most tokens that a step drafts for a request."""
        self._retrieval, self.most_rows, self._device = retrieval, most_rows, device
        self._fields = torch.zeros(4, most_rows, dtype=torch.int32, device=device)
        self._offsets = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._rows = RetrievalRows.of_fields(self._fields, self._offsets)
        # Of a row may be full what lies between two bounds, which drafts alone set apart.
        self._groups_a_row = 1 + num_drafts // retrieval.layout.group
        shape = most_rows * self._groups_a_row, 3
        self._groups = torch.full(shape, -1, dtype=torch.int32, device=device)

    def takes(self, now: RowPass, size: int) -> bool:
        if now.reads is None or not self._retrieval.fits(now.reads.most[None]):
            return False
        return len(self._full_groups(now.reads)) <= size * self._groups_a_row

    def _full_groups(self, reads: DraftReads) -> np.ndarray:
        planned = self._retrieval.sidecars.groups_of_drafts(reads.requests, reads.least, reads.most)
        return np.empty((0, 3), dtype=np.int32) if planned is None else planned

    def set(self, now: RowPass | None, size: int) -> None:
        fields, offsets = np.zeros((4, size), dtype=np.int32), np.zeros(size, dtype=np.int64)
        groups = np.full((size * self._groups_a_row, 3), -1, dtype=np.int32)
        if now is not None:
            assert now.reads is not None
            rows, planned = now.num_rows, self._full_groups(now.reads)
            index, budgets = np.arange(rows), np.full(rows, now.reads.budget)
            unit = self._retrieval.layout.unit
            fields[:, :rows], offsets[:rows] = pack(index, index, now.reads.most, budgets, unit)
            groups[: len(planned)] = planned
        for mine, values in (
            (self._fields[:, :size], fields),
            (self._offsets[:size], offsets),
            (self._groups[: len(groups)], groups),
        ):
            mine.copy_(async_tensor_h2d(values, device=self._device))
        if now is not None:
            # Scores have room by the bounds.
            self._rows.lens[: now.num_rows].copy_(now.lens)

    def beside(self, size: int, tables: tuple[Tensor, ...]) -> tuple[None, RetrievalPass]:
        rows, groups = self._rows.first(size), self._groups[: size * self._groups_a_row]
        return None, RetrievalPass((Mode.ALL,), [[rows]], tables, True, full_groups=groups)
