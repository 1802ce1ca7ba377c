"""What tuning minimises, and what it reports of held-out answers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = torch.nn.Module
# Rows whose logits over the whole vocabulary exist at once: 1,024 of 150,000 are 0.6 GB in float32.
ROWS_AT_ONCE = 1024


def distillation_loss(states: Tensor, head: Head, teacher: Tensor, teacher_head: Head) -> Tensor:
    """Mean KL(teacher || student) over rows, in nats.

    states, teacher: (n, hidden), final states of student and teacher, each before its own head.
    """

    def kl(states: Tensor, teacher: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher_head(teacher).float().log_softmax(dim=-1)
        logprobs = head(states).float().log_softmax(dim=-1)
        return F.kl_div(logprobs, target, reduction="sum", log_target=True)

    return _mean(kl, states, teacher)


def hidden_loss(states: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared distance of the student's hidden states from the teacher's, in shares of the
    teacher's squared norm; states and teacher (layers, n, hidden)."""

    def shares(mine: Tensor, goal: Tensor) -> Tensor:
        mine, goal = mine.float(), goal.float()
        return ((mine - goal).square().sum(dim=-1) / goal.square().sum(dim=-1)).sum()

    # A layer at a time, and again in the backward pass: all in float32 take gigabytes.
    total = torch.zeros((), device=states.device)
    for mine, goal in zip(states, teacher, strict=True):
        total = total + checkpoint(shares, mine, goal, use_reentrant=False)
    return total / states[..., 0].numel()


def supervised_loss(states: Tensor, head: Head, targets: Tensor) -> Tensor:
    """Mean cross entropy over rows, in nats; states (n, hidden), targets (n,) int64."""

    def cross_entropy(states: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(states).float(), targets, reduction="sum")

    return _mean(cross_entropy, states, targets)


def _mean(loss: Callable[[Tensor, Tensor], Tensor], states: Tensor, goal: Tensor) -> Tensor:
    """Mean of `loss` over rows, whose logits are made anew in the backward pass."""
    total = torch.zeros((), device=states.device)
    for begin in range(0, len(states), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        total = total + checkpoint(loss, states[part], goal[part], use_reentrant=False)
    return total / len(states)


@dataclass(frozen=True)
class Agreement:
    """How close a model's predictions of answers' tokens are to the full-depth model's.

    kl: KL(full || model) in nats and greedy: tokens whose most probable choice is the same, both
        summed over `tokens`.
    same: answers all of whose tokens are the same, of `answers`. Where answers are greedy ones of
        the full-depth model, the model would give exactly these itself.
    """

    kl: float = 0.0
    greedy: float = 0.0
    tokens: int = 0
    same: int = 0
    answers: int = 0

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(
            self.kl + other.kl,
            self.greedy + other.greedy,
            self.tokens + other.tokens,
            self.same + other.same,
            self.answers + other.answers,
        )

    def as_json(self) -> dict[str, float | int]:
        """Means, and what they are over."""
        tokens, answers = max(self.tokens, 1), max(self.answers, 1)
        return {
            "kl": round(self.kl / tokens, 5),
            "greedy": round(self.greedy / tokens, 5),
            "tokens": self.tokens,
            "same": round(self.same / answers, 5),
            "answers": self.answers,
        }


@torch.no_grad()
def agreements(
    states: Tensor, head: Head, teacher: Tensor, teacher_head: Head, lengths: list[int]
) -> list[Agreement]:
    """How far the student agrees with the full-depth model, for each answer.

    states, teacher: (n, hidden), their final states, a row for each token of the answers. head,
        teacher_head: their output heads. lengths: tokens of each answer, in the rows' order.
    """
    kl, same = [], []
    for begin in range(0, len(states), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        logprobs = head(states[part]).float().log_softmax(dim=-1)
        target = teacher_head(teacher[part]).float().log_softmax(dim=-1)
        kl.append((target.exp() * (target - logprobs)).sum(dim=-1))
        same.append(logprobs.argmax(dim=-1) == target.argmax(dim=-1))
    found = []
    for nats, hits in zip(
        torch.cat(kl).cpu().split(lengths), torch.cat(same).cpu().split(lengths), strict=True
    ):
        found.append(Agreement(nats.sum().item(), hits.sum().item(), len(hits), int(hits.all()), 1))
    return found
