"""Losses and agreement, against transformers-free arithmetic."""

import pytest
import torch
import torch.nn.functional as F

from vllm_kvx.tools.tune_speed import loss


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(loss, "ROWS_AT_ONCE", 4)


@pytest.fixture
def rows():
    torch.manual_seed(0)
    head, teacher_head = torch.nn.Linear(6, 11), torch.nn.Linear(6, 11)
    states = torch.randn(10, 6, requires_grad=True)
    return states, head, torch.randn(10, 6), teacher_head


def divergence(states, head, teacher, teacher_head):
    """KL(teacher || student), (n,)."""
    p, q = teacher_head(teacher).softmax(dim=-1), head(states).softmax(dim=-1)
    return (p * (p / q).log()).sum(dim=-1)


def test_distillation_is_the_mean_divergence(rows):
    states, *others = rows
    found = loss.distillation_loss(*rows)
    expected = divergence(*rows).mean()
    torch.testing.assert_close(found, expected)
    mine = torch.autograd.grad(found, [states, *others[0].parameters()])
    theirs = torch.autograd.grad(expected, [states, *others[0].parameters()])
    for gradient, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(gradient, other)


def test_the_teacher_learns_nothing(rows):
    states, head, teacher, teacher_head = rows
    loss.distillation_loss(states, head, teacher.requires_grad_(), teacher_head).backward()
    assert teacher.grad is None
    assert all(parameter.grad is None for parameter in teacher_head.parameters())


def test_hidden_states_are_compared_row_by_row():
    torch.manual_seed(0)
    states, teacher = torch.randn(3, 5, 6, requires_grad=True), torch.randn(3, 5, 6)
    # A row a thousand times as large counts as much as the others.
    with torch.no_grad():
        teacher[1, 2] *= 1000
        states[1, 2] *= 1000
    found = loss.hidden_loss(states, teacher)
    shares = [
        ((states[i, j] - teacher[i, j]).norm() / teacher[i, j].norm()) ** 2
        for i in range(3)
        for j in range(5)
    ]
    torch.testing.assert_close(found, torch.stack(shares).mean())
    assert loss.hidden_loss(teacher, teacher) == 0
    narrow = loss.hidden_loss(states.bfloat16(), teacher.bfloat16())
    assert narrow.dtype == torch.float32


def test_supervised_is_the_mean_cross_entropy(rows):
    states, head, *_ = rows
    targets = torch.arange(10)
    expected = F.cross_entropy(head(states), targets)
    torch.testing.assert_close(loss.supervised_loss(states, head, targets), expected)


def test_agreement_by_answer(rows):
    states, head, teacher, teacher_head = rows
    found = loss.agreements(states, head, teacher, teacher_head, [3, 6, 1])
    kl = divergence(*rows).detach().split([3, 6, 1])
    hits = head(states).argmax(-1) == teacher_head(teacher).argmax(-1)
    for one, nats, same in zip(found, kl, hits.split([3, 6, 1]), strict=True):
        assert one.kl == pytest.approx(nats.sum().item(), rel=1e-5)
        assert (one.greedy, one.tokens) == (same.sum().item(), len(same))
        assert (one.same, one.answers) == (int(same.all()), 1)
    total = sum(found, loss.Agreement()).as_json()
    assert total["tokens"] == 10 and total["answers"] == 3
    assert total["kl"] == pytest.approx(divergence(*rows).mean().item(), abs=1e-5)


def test_a_model_agrees_with_itself(rows):
    states, head, *_ = rows
    (one,) = loss.agreements(states, head, states, head, [10])
    assert one.kl == pytest.approx(0, abs=1e-5)
    assert (one.greedy, one.same) == (10, 1)
