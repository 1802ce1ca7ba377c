"""The dense equations of saliency against their definitions."""

import pytest
import torch
from reference import fastkv

from vllm_kvx.equations.saliency import kept_indices, propagation_scores

HEADS, WINDOW, KEYS = 6, 5, 70


def attention(seed: int) -> torch.Tensor:
    """(H, w, N) rows that sum to one."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(HEADS, WINDOW, KEYS, generator=generator) * 3).softmax(dim=-1)


@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_propagation_scores(reduction: str, kernel: int) -> None:
    rows = attention(kernel)
    scores = propagation_scores(rows, kernel, reduction)
    assert scores.shape == (KEYS - WINDOW,) and scores.dtype == torch.float32
    square = torch.zeros(HEADS, KEYS, KEYS)
    square[:, -WINDOW:] = rows
    (expected,) = fastkv.saliency(square, 1, WINDOW, kernel, reduction)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-7)


def test_a_reduction_that_is_none() -> None:
    with pytest.raises(ValueError, match="sum or max, got 'mean'"):
        propagation_scores(attention(0), 1, "mean")


@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_a_plateau_keeps_its_peak(reduction: str) -> None:
    """Whatever part of the highest plateau stays, the key that was attended to is in it."""
    for seed in range(20):
        rows = attention(seed)
        pooled, unpooled = (propagation_scores(rows, kernel, reduction) for kernel in (7, 1))
        best = int(pooled.argmax())
        peak = int(unpooled.argmax()) if reduction == "max" else None
        for count in range(1, 8):
            kept = kept_indices(pooled, WINDOW + count, WINDOW, unpooled)
            (among,) = (kept[:-WINDOW],)
            assert peak is None or peak in among
            # Of the plateau, those that are left out are no higher than those that stay.
            tied = (pooled == pooled[best]).nonzero()[:, 0]
            stay = tied[torch.isin(tied, among)]
            out = tied[~torch.isin(tied, among)]
            if len(out):
                assert unpooled[out].max() <= unpooled[stay].min()


def test_equal_everywhere_is_by_position() -> None:
    scores = torch.ones(2, 9)
    assert kept_indices(scores, 5, 2, scores).tolist() == [[0, 1, 2, 9, 10]] * 2
