"""What CUDA graphs of passes do beside attention: all that they read is at fixed addresses."""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.rows import RetrievalRows, offsets_of
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

    def plan(self, now: RowPass, size: int) -> Any | None:
        """What `set` takes for `now`; None where no graph does what it has to do."""

    def set(self, plan: Any | None, size: int) -> None:
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

    def plan(self, now: RowPass, size: int) -> RowPass | None:
        return now if now.work is not None and now.work.only_keeps else None

    def set(self, plan: RowPass | None, size: int) -> None:
        at = self._at[:, :size]
        if plan is None:
            at.zero_()
            return
        assert plan.work is not None and plan.work.windows is not None
        windows, (rows, slots, places) = plan.work.windows, at
        torch.mul(self._count[:size], self._count[:size] < plan.num_rows, out=rows)
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

    The host tells a step's passes all at once: how much room scores need in the last of them, and
    which groups of the index drafts may have filled by then. Each pass writes all of these beside
    each layer: one that is not full yet is read by nobody, and written again by the passes to come.
    """

    def __init__(self, retrieval: Retrieval, most_rows: int, num_drafts: int, device: Any) -> None:
        """num_drafts: the most tokens that a step drafts for a request."""
        self._retrieval, self.most_rows = retrieval, most_rows
        # A step drafts as many as the one before may have, which set the bounds apart.
        self._groups_a_row = 1 + (2 * num_drafts - 1) // retrieval.layout.group
        # Each column begins at a multiple of 16 bytes, for which kernels are compiled.
        room = self._room = -(-most_rows // 4) * 4
        count = 5 * room + 3 * most_rows * self._groups_a_row
        self._told = torch.zeros(count, dtype=torch.int32, device=device)
        offsets, fields, self._groups = self._columns(self._told)
        self._lens = torch.zeros(most_rows, dtype=torch.int32, device=device)
        tokens, requests, budgets = fields
        self._rows = RetrievalRows(tokens, requests, self._lens, budgets, offsets)

    def _columns(self, told: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of what the host tells.

        (R,) int64 offsets of rows' scores, (3, R) int32 rows of the query and of the block tables
        and budgets, and (n, 3) int32 groups to write.
        """
        room = self._room
        offsets = told[: 2 * room].view(torch.int64)
        fields = told[2 * room : 5 * room].view(3, room)
        return offsets, fields, told[5 * room :].view(-1, 3)

    def plan(self, now: RowPass, size: int) -> Tensor | None:
        """What `set` takes, on the host. now: the first pass of a step, with all passes' bounds."""
        reads, retrieval = now.reads, self._retrieval
        if reads is None or not retrieval.fits(reads.most[None]):
            return None
        written = retrieval.sidecars.groups_of_drafts(reads.requests, reads.least, reads.most)
        if written is not None and len(written) > size * self._groups_a_row:
            return None
        told = torch.zeros(self._told.shape, dtype=torch.int32)
        offsets, fields, groups = (each.numpy() for each in self._columns(told))
        rows = now.num_rows
        offsets[:rows] = offsets_of(reads.most, retrieval.layout.unit)
        fields[:2, :rows] = np.arange(rows)
        fields[2, :rows] = reads.budget
        groups.fill(-1)
        if written is not None:
            groups[: len(written)] = written
        return told

    def set(self, plan: Tensor | None, size: int) -> None:
        if plan is None:
            self._told.zero_()
            self._groups.fill_(-1)
        else:
            async_tensor_h2d(plan, out=self._told)

    def see(self, lens: Tensor, is_padding: Tensor) -> None:
        """Within a graph: rows see `lens` entries, (size,) int32; none those of `is_padding`."""
        self._lens[: len(lens)].copy_(lens.masked_fill(is_padding, 0))

    def beside(self, size: int, tables: tuple[Tensor, ...]) -> tuple[None, RetrievalPass]:
        rows, groups = self._rows.first(size), self._groups[: size * self._groups_a_row]
        return None, RetrievalPass((Mode.ALL,), [[rows]], tables, True, full_groups=groups)
