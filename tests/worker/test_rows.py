"""Row plans against a per-position definition."""

import numpy as np
import pytest

from vllm_kvx.worker.rows import plan_rows


@pytest.mark.parametrize("seed", range(50))
def test_plan_keeps_exactly_the_rows_outside_the_gaps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_reqs = int(rng.integers(1, 7))
    begins = rng.integers(0, 30, num_reqs)
    counts = rng.integers(1, 40, num_reqs)
    starts = np.stack([rng.integers(0, 3, num_reqs)] * 2)
    sizes = np.stack([rng.integers(0, 40, num_reqs) * rng.integers(0, 2, num_reqs)] * 2)
    sizes[1] += rng.integers(0, 10, num_reqs)  # A later segment's gap covers an earlier one's.
    positions = np.concatenate([np.arange(b, b + c) for b, c in zip(begins, counts, strict=True)])
    owner = np.repeat(np.arange(num_reqs), counts)

    previous = np.arange(len(positions))
    for segment, rows in enumerate(plan_rows(begins, counts, starts, sizes)):
        low, high = starts[segment][owner], (starts + sizes)[segment][owner]
        expected = np.flatnonzero((positions < low) | (positions >= high))
        if rows is None:
            assert len(expected) == len(positions)
            continue
        assert rows.indices.tolist() == expected.tolist()
        assert previous[rows.from_previous].tolist() == expected.tolist()
        assert rows.counts.tolist() == np.bincount(owner[expected], minlength=num_reqs).tolist()
        previous = expected


def test_no_gap_is_no_plan() -> None:
    zeros = np.zeros((1, 2), dtype=int)
    assert plan_rows(np.array([0, 9]), np.array([4, 1]), zeros, zeros) == [None]


def test_where_a_layer_is_split_requests_that_lose_rows_are_projected() -> None:
    """Both ends of a prompt stay; a decode token and a policy that stores no gap are left alone."""
    begins, counts = np.array([0, 50, 0, 0]), np.array([20, 1, 8, 20])
    starts, sizes = np.array([[0] * 4, [2, 2, 0, 1]]), np.array([[0] * 4, [15, 15, 0, 9]])
    projects = np.array([[False] * 4, [True, True, True, False]])
    below, rows = plan_rows(begins, counts, starts, sizes, projects)
    assert below is None and rows is not None
    assert rows.projected.tolist() == [0]
    assert rows.counts.tolist() == [5, 1, 8, 11] and rows.heads.tolist() == [2, 0, 8, 1]


def test_middle_chunk_keeps_no_row() -> None:
    (rows,) = plan_rows(np.array([32]), np.array([16]), np.array([[1]]), np.array([[90]]))
    assert rows is not None and len(rows.indices) == 0 and rows.counts.tolist() == [0]
