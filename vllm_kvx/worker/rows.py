"""Which rows of a step's batch each segment of the decoder runs: planned, then on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_kvx.worker.batch import PassBatch


@dataclass(frozen=True)
class SegmentRows:
    """Rows that go on into one segment when it does not run them all.

    Attributes:
        indices: (N,) int64, ascending rows of the whole batch.
        from_previous: (N,) int64, the same rows counted in the previous segment's output.
        counts: (R,) int32, rows per request. heads: (R,), those of them before its gap; all of
            them where it has none.
        projected: (P,) int64 requests of which rows leave here that the segment's first layer
            stores all the same: it is split, and their entries are projected.
    """

    indices: np.ndarray
    from_previous: np.ndarray
    counts: np.ndarray
    heads: np.ndarray
    projected: np.ndarray


@dataclass(frozen=True)
class DeviceRows:
    """The rows of one segment on the device, and the batch that they are.

    Requests without a row are left out: backends know them at the end of a batch only.

    Attributes:
        in_batch: (N,) int64 rows of the whole batch.
        from_previous: (N,) int64 rows of the previous segment's output.
        requests: (P,) int64 places of the batch's requests that have a row; None if all have.
        batch: the rest. plan: the same on the host.
    """

    in_batch: Tensor
    from_previous: Tensor
    requests: Tensor | None
    batch: PassBatch
    plan: SegmentRows

    @property
    def num_rows(self) -> int:
        return self.in_batch.shape[0]

    @classmethod
    def of(
        cls,
        rows: SegmentRows,
        batch: InputBatch,
        block_tables: Sequence[Tensor],
        slot_mappings: Tensor,
        device: torch.device,
    ) -> "DeviceRows":
        """block_tables, slot_mappings: of `batch`, the step's, by KV group."""
        indices = async_tensor_h2d(rows.indices, device=device)
        previous = indices
        if rows.from_previous is not rows.indices:
            previous = async_tensor_h2d(rows.from_previous, device=device)
        busy, tables, requests = np.flatnonzero(rows.counts), tuple(block_tables), None
        if len(busy) < batch.num_reqs:
            requests = async_tensor_h2d(busy, device=device)
            tables = tuple(table.index_select(0, requests) for table in block_tables)
        cut = PassBatch(
            busy,
            rows.counts[busy],
            batch.positions.index_select(0, indices),
            tables,
            slot_mappings.index_select(1, indices),
        )
        return cls(indices, previous, requests, cut, rows)

    def of_stage(self, batch: InputBatch) -> InputBatch:
        """`batch`, the step's with the stored lengths of a KV stage, cut down to these rows."""
        assert batch.seq_lens_cpu_upper_bound is not None
        seq_lens = batch.seq_lens[: batch.num_reqs]
        if self.requests is not None:
            seq_lens = seq_lens.index_select(0, self.requests)
        bounds = batch.seq_lens_cpu_upper_bound[torch.from_numpy(self.batch.requests)]
        return self.batch.of(batch, seq_lens, bounds)


@dataclass(frozen=True)
class ProjectedRows:
    """Rows of prompts whose keys and values are projected above some layer, by request (R,).

    Attributes:
        layers: int64, the first layer with projected entries.
        counts: int64, prompt rows in the step, the first ones of the request; 0 if none are
            projected.
        ends_prompt: bool, whether the prompt's last token is among them. It runs the layers above
            too, where its entries are not its own.
    """

    layers: np.ndarray
    counts: np.ndarray
    ends_prompt: np.ndarray

    def at(self, layer: int) -> np.ndarray:
        """(P,) int64 requests whose rows are projected into the layers from this one on."""
        return np.flatnonzero((self.layers == layer) & (self.counts > 0))

    def unwritten(self, first: int, row_starts: np.ndarray) -> np.ndarray:
        """(n,) int64 rows of a pass from layer `first` on whose entries are there already.

        row_starts: (R,) first row of each request in the pass.
        """
        return row_starts[(self.layers <= first) & self.ends_prompt]


def plan_rows(
    begins: np.ndarray,
    counts: np.ndarray,
    gap_starts: np.ndarray,
    gap_sizes: np.ndarray,
    projects: np.ndarray | None = None,
) -> list[SegmentRows | None]:
    """Plans the rows of every segment; ``None`` means all rows.

    Args:
        begins: (R,) position of each request's first token in this step.
        counts: (R,) tokens scheduled per request.
        gap_starts, gap_sizes: (S, R) gap of each request in each segment. A later segment's gap
            covers an earlier one's, so rows only ever leave on the way up.
        projects: (S, R) bool, whether the first layer of a segment stores the request's rows in its
            gap, none of which left before; None where no layer does.
    """
    ends = begins + counts
    row_starts = np.cumsum(counts) - counts
    plan: list[SegmentRows | None] = []
    previous: np.ndarray | None = None
    for segment, (starts, sizes) in enumerate(zip(gap_starts, gap_sizes, strict=True)):
        head = np.clip(np.minimum(ends, starts) - begins, 0, counts)
        tail = np.where(sizes > 0, np.clip(ends - np.maximum(begins, starts + sizes), 0, counts), 0)
        kept = np.where(sizes > 0, head + tail, counts)
        if (kept == counts).all():
            plan.append(None)
            continue
        head = np.where(sizes > 0, head, counts)
        indices = ranges(
            np.stack([row_starts, row_starts + counts - tail], axis=1).ravel(),
            np.stack([head, tail], axis=1).ravel(),
        )
        relative = indices if previous is None else np.searchsorted(previous, indices)
        leaves = np.zeros(0, dtype=np.int64)
        if projects is not None:
            leaves = np.flatnonzero(projects[segment] & (kept < counts))
        plan.append(SegmentRows(indices, relative, kept.astype(np.int32), head, leaves))
        previous = indices
    return plan


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates ``arange(start, start + length)`` over all pairs, (sum(lengths),) int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    offsets = np.repeat(starts - (ends - lengths), lengths)
    return (offsets + np.arange(total)).astype(np.int64)
