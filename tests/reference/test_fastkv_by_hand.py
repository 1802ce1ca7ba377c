"""FastKV's saliency and choice of entries in the reference, worked out by hand."""

from functools import partial

import pytest
import torch

from . import fastkv


def test_top_by_hand() -> None:
    scores = torch.tensor([1.0, 4.0, 4.0, 4.0, 2.0, 8.0, 2.0])
    for count, kept, slack in (
        (0, [], float("inf")),
        (1, [5], 4 / 8),
        (2, [1, 5], 2 / 4),  # among the fours: the next other scores are 8 and 2
        (3, [1, 2, 5], 2 / 4),
        (4, [1, 2, 3, 5], 2 / 4),
        (5, [1, 2, 3, 4, 5], 1 / 2),
        (6, [1, 2, 3, 4, 5, 6], 1 / 2),
        (7, [0, 1, 2, 3, 4, 5, 6], float("inf")),
    ):
        rows, gap = fastkv.top(scores, count, window=2)
        assert (rows.tolist(), gap) == ([*kept, 7, 8], slack), count
    assert fastkv.top(torch.ones(5), 2, window=1)[0].tolist() == [0, 1, 5]
    assert fastkv.top(torch.ones(5), 2, window=1)[1] == float("inf")
    # The nearest of the other scores, on either side.
    assert fastkv.top(torch.tensor([16.0, 5, 4, 4, 1]), 3, window=1)[1] == pytest.approx(1 / 5)
    assert fastkv.top(torch.tensor([16.0, 8, 4, 4, 3, 1]), 3, window=1)[1] == pytest.approx(1 / 4)
    assert fastkv.top(torch.zeros(1000), 300, window=1)[0].tolist() == [*range(300), 1000]


def test_top_of_plateaus_by_hand() -> None:
    scores = torch.tensor([1.0, 4.0, 4.0, 4.0, 2.0, 8.0, 4.0])
    unpooled = torch.tensor([1.0, 2.0, 4.0, 1.0, 2.0, 8.0, 2.0])
    for count, kept, slack in (
        (1, [5], 4 / 8),
        (2, [2, 5], 2 / 4),  # the peak of the fours; the next below it has 2
        (3, [1, 2, 5], 1 / 2),  # of two twos the lower row; the next others are 4 and 1
        (4, [1, 2, 5, 6], 1 / 2),
        (5, [1, 2, 3, 5, 6], 2 / 4),  # all of the fours
        (7, [0, 1, 2, 3, 4, 5, 6], float("inf")),
    ):
        rows, gap = fastkv.top(scores, count, 1, unpooled)
        assert (rows.tolist(), gap) == ([*kept, 7], slack), count


def test_saliency_by_hand() -> None:
    """The window is dropped before pooling, and heads are summed after it."""
    probs = torch.zeros(2, 6, 6)
    probs[0, 4] = torch.tensor([0.1, 0.0, 0.0, 0.2, 0.7, 0.0])
    probs[0, 5] = torch.tensor([0.1, 0.0, 0.0, 0.0, 0.5, 0.4])
    probs[1, 4] = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.5, 0.0])
    probs[1, 5] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    scores = partial(torch.tensor, dtype=torch.float64)
    probs[:, :4] = 9  # queries before the window have no say
    one = fastkv.saliency(probs, kv_heads=1, window=2, kernel=3)
    torch.testing.assert_close(one, scores([[0.7, 0.7, 0.7, 0.2]]))
    two = fastkv.saliency(probs, kv_heads=2, window=2, kernel=3)
    torch.testing.assert_close(two, scores([[0.2] * 4, [0.5, 0.5, 0.5, 0.0]]))
    wide = fastkv.saliency(probs, kv_heads=1, window=2, kernel=9)
    torch.testing.assert_close(wide, scores([[0.7] * 4]))


@pytest.mark.parametrize("heads", [5, 8, 16])
def test_equal_columns_have_equal_scores(heads: int) -> None:
    """Also where a vectorised sum over many heads has a remainder of columns."""
    for length in (5, 9, 35, 77):
        column = torch.rand(heads, length + 2, 1, generator=torch.Generator().manual_seed(length))
        scores = fastkv.saliency(column.expand(-1, -1, length + 2), 1, window=2, kernel=3)
        assert scores.shape == (1, length) and (scores == scores[0, 0]).all()
