"""SPEED's diagnostic quantities, against values by hand."""

import math

import numpy as np
import pytest
import torch

from vllm_kvx.equations.cutoff import (
    attention_shares,
    conditional_entropy,
    correlation,
    divergence,
    straightening,
    turns,
)


def test_shares_of_two_heads() -> None:
    """Four prompt tokens, of which 1 and 2 are the user's and 3 the template's; two generated."""
    attention = torch.tensor(
        [
            [[0.2, 0.4, 0.2, 0.1, 0.1, 0.0], [0.1, 0.2, 0.1, 0.1, 0.3, 0.2]],
            [[0.4, 0.0, 0.2, 0.1, 0.3, 0.0], [0.1, 0.0, 0.1, 0.1, 0.1, 0.6]],
        ]
    )
    shares = attention_shares(attention, torch.tensor([1, 2]), 4)
    assert shares.user.item() == pytest.approx((0.4 + 0.2) / 2)
    assert shares.first.item() == pytest.approx((0.3 + 0.1) / 2)
    # The first generated token has none before it; their own positions count as no share.
    assert shares.earlier.item() == pytest.approx((0 + 0.2) / 2)
    # Both rows have the heads' mean attention in equal parts on the two tokens.
    assert shares.entropy.item() == pytest.approx(math.log(2))
    assert all(value.dtype == torch.float64 for value in shares)


def test_entropy_is_of_the_renormalised_attention() -> None:
    rows = torch.tensor([[0.05, 0.15], [0.3, 0.0], [0.0, 0.0]], dtype=torch.float64)
    spread = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert conditional_entropy(rows).tolist() == pytest.approx([spread, 0, math.log(2)])


def test_turns() -> None:
    square = torch.tensor([[0.0, 0], [1, 0], [1, 2], [1, 5], [1, 4], [1, 4], [2, 4]])
    angles = turns(square)
    assert angles[:3].tolist() == pytest.approx([math.pi / 2, 0, math.pi], abs=1e-6)
    assert angles[3:].isnan().all()  # One step is of length zero.
    assert turns(square[:2]).shape == (0,)


def test_long_trajectories_are_measured_in_parts() -> None:
    states = torch.randn(9001, 3, generator=torch.Generator().manual_seed(0))
    steps = np.diff(states.double().numpy(), axis=0)
    dots = (steps[:-1] * steps[1:]).sum(axis=1)
    lengths = np.linalg.norm(steps, axis=1)
    expected = np.arccos(dots / (lengths[:-1] * lengths[1:]))
    np.testing.assert_allclose(turns(states).numpy(), expected, atol=2e-3)


def test_straightening_is_relative_to_the_first_layer() -> None:
    assert straightening(torch.tensor([2.0, 1.5, 2.25])).tolist() == [0, 0.5, -0.25]


def test_correlation() -> None:
    first, second = torch.tensor([1.0, 2, 3, 5]), torch.tensor([2.0, 1, 4, 4])
    expected = np.corrcoef(first.numpy(), second.numpy())[0, 1]
    assert correlation(first, second) == pytest.approx(expected)
    assert math.isnan(correlation(first, torch.ones(4)))


def test_divergence() -> None:
    full = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]]).log()
    cut = torch.tensor([[0.25, 0.75, 0.0], [0.9, 0.1, 0.0]]).log()
    kl, same = divergence(full, cut)
    assert kl.tolist() == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0])
    assert same.tolist() == [False, True]
    # Logits are shifted at will.
    assert divergence(full + 3, cut - 2).kl.tolist() == pytest.approx(kl.tolist(), abs=1e-6)
