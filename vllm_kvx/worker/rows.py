"""Which rows of a step's batch each segment of the decoder runs, planned on the host."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SegmentRows:
    """Rows that go on into one segment when it does not run them all.

    Attributes:
        indices: (N,) int64, ascending rows of the whole batch.
        from_previous: (N,) int64, the same rows counted in the previous segment's output.
        counts: (R,) int32, rows per request.
    """

    indices: np.ndarray
    from_previous: np.ndarray
    counts: np.ndarray


def plan_rows(
    begins: np.ndarray,
    counts: np.ndarray,
    gap_starts: np.ndarray,
    gap_sizes: np.ndarray,
) -> list[SegmentRows | None]:
    """Plans the rows of every segment above the first; ``None`` means all rows.

    Args:
        begins: (R,) position of each request's first token in this step.
        counts: (R,) tokens scheduled per request.
        gap_starts, gap_sizes: (S, R) gap of each request in each segment. A later segment's gap
            covers an earlier one's, so rows only ever leave on the way up.
    """
    ends = begins + counts
    row_starts = np.cumsum(counts) - counts
    plan: list[SegmentRows | None] = []
    previous: np.ndarray | None = None
    for starts, sizes in zip(gap_starts, gap_sizes, strict=True):
        head = np.clip(np.minimum(ends, starts) - begins, 0, counts)
        tail = np.where(sizes > 0, np.clip(ends - np.maximum(begins, starts + sizes), 0, counts), 0)
        kept = np.where(sizes > 0, head + tail, counts)
        if (kept == counts).all():
            plan.append(None)
            continue
        head = np.where(sizes > 0, head, counts)
        indices = _ranges(
            np.stack([row_starts, row_starts + counts - tail], axis=1).ravel(),
            np.stack([head, tail], axis=1).ravel(),
        )
        relative = indices if previous is None else np.searchsorted(previous, indices)
        plan.append(SegmentRows(indices, relative, kept.astype(np.int32)))
        previous = indices
    return plan


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates ``arange(start, start + length)`` over all pairs, (sum(lengths),) int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    offsets = np.repeat(starts - (ends - lengths), lengths)
    return (offsets + np.arange(total)).astype(np.int64)
