"""StructKV's saliency, retention and blocks in the reference, worked out by hand."""

from dataclasses import dataclass

import pytest
import torch

from . import structkv
from .conftest import paper
from .structkv import Struct


def test_saliency_by_hand() -> None:
    """Queries of the window, keys outside it, all heads alike, and no pooling."""
    probs = torch.zeros(2, 6, 6)
    probs[0, 4] = torch.tensor([0.1, 0.0, 0.0, 0.2, 0.7, 0.0])
    probs[0, 5] = torch.tensor([0.1, 0.0, 0.0, 0.0, 0.5, 0.4])
    probs[1, 4] = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.5, 0.0])
    probs[1, 5] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    probs[:, :4] = 9  # queries before the window have no say
    expected = torch.tensor([0.2, 0.5, 0.0, 0.2], dtype=torch.float64)
    torch.testing.assert_close(structkv.local_saliency(probs, window=2), expected)
    for window in (6, 7):
        assert structkv.local_saliency(probs, window).shape == (0,)


@pytest.mark.parametrize(
    ("heads", "kernel", "count", "kept"),
    [
        ("shared", 1, 2, [[1, 4]]),
        ("shared", 3, 2, [[1, 2]]),  # 8 8 8 6 5 5 0: among the 8s the highest unpooled
        ("shared", 3, 3, [[0, 1, 2]]),
        ("shared", 3, 4, [[0, 1, 2, 3]]),  # pooled after the sum over heads it were 4
        ("shared", 3, 5, [[0, 1, 2, 3, 4]]),
        ("own", 1, 2, [[1, 2], [0, 4]]),  # 4, and the lowest of zeros
        ("own", 3, 2, [[1, 2], [3, 4]]),  # 5 5 5: the peak, and the lower of its neighbours
        ("own", 13, 2, [[1, 2], [0, 4]]),  # all equal
    ],
)
def test_retention_by_hand(heads: str, kernel: int, count: int, kept: list[list[int]]) -> None:
    """Each query head is pooled over the rows before the window, then heads are added up."""
    probs = torch.zeros(2, 8, 8)
    probs[0, 7] = torch.tensor([0.0, 8, 1, 0, 0, 0, 0, 99])
    probs[1, 7] = torch.tensor([0.0, 0, 0, 0, 5, 0, 0, 99])
    probs[:, :7] = 9  # queries before the window have no say
    struct = Struct(0, heads=heads, kernel=kernel, window=1, kv_budget=count + 1)
    sets = structkv.retained_by(probs, 2, struct)
    rows = [structkv.retain_rows(*by, 8, 8, struct)[0].tolist() for by in sets]
    assert rows == [[*mine, 7] for mine in kept]


@pytest.mark.parametrize("heads", [1, 5, 16])
def test_equal_columns_have_equal_scores(heads: int) -> None:
    """Also where a vectorised sum would have a remainder of columns."""
    for length in (5, 9, 35, 77):
        generator = torch.Generator().manual_seed(length)
        # Far enough apart that float64 rounds.
        column = torch.rand(heads, length + 8, 1, generator=generator).double() ** 30
        scores = structkv.local_saliency(column.expand(-1, -1, length + 8), window=8)
        assert scores.shape == (length,) and (scores == scores[0]).all()


@dataclass(frozen=True)
class BlockCase:
    centrality: list[float]  # of the rows before the window
    window: int
    size: int
    kept: int  # blocks that a rate of 1/4 would keep
    rows: list[int]
    slack: float = float("inf")


@pytest.mark.parametrize(
    "case",
    [
        # Sums 3, 4, 2 and a block that the window shares.
        BlockCase([1, 2, 0, 4, 2, 0, 9], 2, 2, 1, [6, 7, 8]),
        BlockCase([1, 2, 0, 4, 2, 0, 9], 2, 2, 2, [6, 7, 8]),  # 6..7 and 8: two blocks
        BlockCase([1, 2, 0, 4, 2, 0, 9], 2, 2, 3, [2, 3, 6, 7, 8], 1 / 4),
        BlockCase([1, 2, 0, 4, 2, 0, 9], 2, 2, 4, [0, 1, 2, 3, 6, 7, 8], 1 / 3),
        BlockCase([1, 2, 0, 4, 2, 0, 9], 2, 2, 5, list(range(9))),
        BlockCase([1, 2, 0, 4, 2, 0, 9], 2, 2, 9, list(range(9))),
        # The window has a block to itself.
        BlockCase([1, 2, 0, 4], 2, 2, 1, [4, 5]),
        BlockCase([1, 2, 0, 4], 2, 2, 2, [2, 3, 4, 5], 1 / 4),
        # Among equals the lower block.
        BlockCase([1, 2, 3, 0, 0, 3, 7, 0], 1, 2, 2, [6, 7, 8], 4 / 7),
        BlockCase([1, 2, 3, 0, 0, 3, 7, 0], 1, 2, 3, [0, 1, 6, 7, 8], 4 / 7),
        BlockCase([1, 2, 3, 0, 0, 3, 7, 0], 1, 2, 4, [0, 1, 2, 3, 6, 7, 8], 4 / 7),
        # Everything is in the window, or in one block.
        BlockCase([], 5, 2, 1, list(range(5))),
        BlockCase([1, 2], 1, 4, 1, [0, 1, 2]),
        BlockCase([1, 5, 3, 2], 1, 1, 3, [1, 2, 4], 1 / 3),
    ],
)
def test_blocks_by_hand(case: BlockCase) -> None:
    centrality = torch.tensor(case.centrality, dtype=torch.float64)
    count = len(centrality) + case.window
    struct = paper(0, kv_rate=0.25, window=case.window, block_size=case.size)
    # The prompt, not the rows that are here, says how many blocks stay.
    for prompt_len in (4 * case.size * case.kept, 4 * case.size * (case.kept - 1) + 1):
        rows, slack = structkv.retain_blocks(centrality, count, prompt_len, struct)
        assert rows.tolist() == case.rows
        assert slack == pytest.approx(case.slack)
