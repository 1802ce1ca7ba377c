"""Quantised keys, scores and choices in FIER's and Quest's reference, by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from . import fier
from .conftest import FIER, QUEST
from .fier import Retrieve


def test_fill_holes_by_hand() -> None:
    fill = fier.fill_holes
    assert fill([1, 3, 4, 8, 9], list(range(10))) == [8, 1, 9, 3, 4]
    assert fill([0, 1, 2], list(range(9))) == [0, 1, 2]
    assert fill([6, 7, 8], list(range(9))) == [6, 7, 8]
    assert fill([0, 5, 7], [0, 2, 5, 7]) == [0, 7, 5]
    assert fill([], [1, 2]) == []


def quantise(keys: list[list[float]], size: int) -> tuple[torch.Tensor, ...]:
    return tuple(bounds[1] for bounds in fier.quantised(torch.tensor(keys), size))


def test_quantised_by_hand() -> None:
    keys = [[1.0, 5.0, -2.0], [3.0, 5.0, 6.0], [2.0, 5.0, 1.5], [1.5, 5.0, 2.5]]
    signs, scales, zeros = quantise(keys, 4)
    # The middle itself counts as above, and so does a channel that is the same everywhere.
    assert signs.tolist() == [[-1, 1, -1], [1, 1, 1], [1, 1, -1], [-1, 1, 1]]
    assert scales.tolist() == [[1, 0, 4]] and zeros.tolist() == [[2, 5, 2]]
    signs, scales, zeros = quantise(keys, 2)
    assert scales.tolist() == [[1, 0, 4], [0.25, 0, 0.5]]
    assert zeros.tolist() == [[2, 5, 2], [1.75, 5, 2]]
    # Bits are those of the float32 middle, scores those of float16 scales and zeros.
    signs, scales, zeros = quantise([[2049.0], [2049.25]], 2)
    assert signs.tolist() == [[-1], [1]] and zeros.tolist() == [[2050]]
    assert scales.tolist() == [[0.125]]


def choose(scores: list[float], size: int, budget: int, **kw: Any) -> list[int]:
    """What is read of keys of one channel, which are their scores."""
    keys = torch.tensor(scores)[:, None]
    retrieve = Retrieve(budget=budget, group=size, **kw)
    return fier.choose(torch.ones(1, 1), keys, retrieve, 1.0)[0].tolist()


def test_choose_by_hand() -> None:
    scores = [1.0, 3, 2, 8, 7, 9, 4, 4, 6, 0]
    # 1-bit copies: 1 3 | 2 8 | 7 9 | 4 4 | the newest group, whatever it is worth
    assert choose(scores, 2, 3) == [5, 8, 9]
    assert choose(scores, 2, 4) == [3, 5, 8, 9]
    assert choose(scores, 2, 6) == [3, 4, 5, 6, 8, 9]  # of the fours, the first
    assert choose(scores, 2, 7) == [3, 4, 5, 6, 7, 8, 9]
    assert choose(scores, 2, 8) == [1, 3, 4, 5, 6, 7, 8, 9]
    assert choose(scores, 2, 9) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert choose(scores, 2, 10) == list(range(10)) == choose(scores, 2, 3, dense_below=11)
    assert choose(scores, 2, 3, dense_below=10) == [5, 8, 9]
    assert choose(scores, 2, 1) == [8, 9]
    # A full group is the newest as long as the step's own token is in it.
    assert choose(scores[:9], 2, 4) == [3, 4, 5, 8]
    assert choose(scores[:8], 4, 4) == [4, 5, 6, 7] and choose(scores[:8], 4, 5) == [3, 4, 5, 6, 7]
    # Pages: greatest 3 | 8 | 9 | 4 | newest. A budget has room for whole ones.
    pages = {"pages": True}
    assert choose(scores, 2, 2, **pages) == [8, 9] == choose(scores, 2, 3, **pages)
    assert choose(scores, 2, 4, **pages) == [4, 5, 8, 9] == choose(scores, 2, 5, **pages)
    assert choose(scores[:9], 2, 6, **pages) == [2, 3, 4, 5, 8]
    assert choose([1.0] * 9, 2, 4, **pages) == [0, 1, 8]
    assert choose([1.0] * 9, 2, 4) == [0, 1, 2, 8]
    assert choose([1.0] * 1000, 2, 300) == [*range(298), 998, 999]


def test_reductions_by_hand() -> None:
    products = torch.tensor([[1.0, 2, 3], [6, 0, 0]], dtype=torch.float64)
    scores = {
        name: fier.reduced((products,) * 3, name, 0.5)[1].tolist()
        for name in ("max", "sum", "softmax")
    }
    one, other = (torch.tensor(row).div(4).exp() for row in ([1.0, 2, 3], [6.0, 0, 0]))
    softmax = (one / one.sum() + other / other.sum()).tolist()
    assert scores == {"max": [6, 2, 3], "sum": [7, 2, 3], "softmax": pytest.approx(softmax)}


def test_page_scores_bound_every_product() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 32, generator=generator)
    for spread in (1, 0.1, 0):
        keys = torch.randn(1, 32, generator=generator)
        keys = keys + spread * torch.randn(320, 32, generator=generator)
        bounds = fier.pages(query, keys, 16)[1]
        products = (query.double() @ keys.double().T).unflatten(1, (-1, 16)).amax(dim=2)
        excess = bounds - products
        assert excess.min() > -0.02 and excess.max() < 60 * spread + 0.02


@pytest.mark.parametrize("retrieve", [FIER, QUEST, replace(FIER, reduction="softmax")], ids=str)
def test_certain_choices_survive_rounding(retrieve: Retrieve) -> None:
    """Small differences of keys and queries flip bits and float16s: no choice with slack moves."""
    generator = torch.Generator().manual_seed(0)
    score = fier.pages if retrieve.pages else fier.tokens
    certain, jumps = 0, 0.0
    for _ in range(40):
        query = torch.randn(2, 16, generator=generator)
        # On a grid, so that keys in the middle of a group and halves of a float16 do occur.
        keys = (torch.randn(50, 16, generator=generator) * 4096).round() / 4096
        read, margin, slack = fier.choose(query, keys, retrieve, 0.25)
        assert slack <= margin and margin >= 0
        low, exact, high = score(query, keys[:48], retrieve.group)
        for _ in range(6):
            noise = torch.rand(keys.shape, generator=generator) * 2 - 1
            near = keys + noise * (fier.ROUNDING * keys.abs().max() / 2)
            moved = score(query, near[:48], retrieve.group)[1]
            assert (low <= moved).all() and (moved <= high).all()
            jumps = max(jumps, float((moved - exact).abs().max()))
            differs = not torch.equal(fier.choose(query, near, retrieve, 0.25)[0], read)
            assert not (differs and slack > 0)
        certain += slack > 0
    assert certain >= 25 and jumps > 2**-11
