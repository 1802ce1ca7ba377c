"""Dense reference for Knorm: every KV head retains the keys of the smallest L2 norm.

Source: arXiv 2406.11430, A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression.
Prefill is full attention in every layer. No query has a say, so there is no window: the last token
is retained only where its own key is short enough.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .fastkv import Context, KeptResult, block, decode, load
from .masked import embed, layers_of, log_softmax


@dataclass(frozen=True)
class Norm:
    """How many rows each KV head retains."""

    kv_rate: float = 0.1
    kv_budget: int | None = None  # tokens; if given, the rate is ignored
    kv_floor: int = 0  # the least that the rate keeps

    def __post_init__(self) -> None:
        if self.kv_budget is not None and self.kv_budget < 1:
            raise ValueError(f"kv_budget={self.kv_budget} must be >= 1")

    def cap(self, prompt_len: int) -> int:
        """The most rows that a KV head retains."""
        budget = max(int(prompt_len * self.kv_rate), self.kv_floor)
        if self.kv_budget is not None:
            budget = self.kv_budget
        return min(max(budget, 1), prompt_len)


def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], norm: Norm
) -> KeptResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    context, row = prefill(model, prompt, norm)
    rows = [row, decode(model, context, generated[:-1])] if len(generated) > 1 else [row]
    return context.result(list(generated), rows)


@torch.no_grad()
def prefill(model: PreTrainedModel, prompt: list[int], norm: Norm) -> tuple[Context, Tensor]:
    """The context after `prompt`, and the log-softmax (1, V) of its last token."""
    layers: Any = layers_of(model)
    total = len(prompt)
    context = Context([], total, [], list(range(total)), float("inf"))
    positions = torch.arange(total)
    hidden = embed(model, prompt)  # (rows, hidden)
    for layer in layers:
        hidden, key, value, _ = block(model, layer, hidden, positions, None)
        rows, slack = retain(key, total, norm)
        context.slack = min(context.slack, slack)
        context.retained.append(positions[rows].tolist())
        gather = rows[:, :, None].expand(-1, -1, key.shape[2])
        context.stored.append((key.gather(1, gather), value.gather(1, gather)))
    return context, log_softmax(model, hidden[-1:])


def retain(key: Tensor, prompt_len: int, norm: Norm) -> tuple[Tensor, float]:
    """Rows that each KV head keeps, (G, kept) int64 ascending, and the slack of the choice.

    key (G, n, D) is rotated, of the rows that the layer computed.
    """
    norms = key.double().norm(dim=-1)  # (G, n)
    count = min(norm.cap(prompt_len), key.shape[1])
    chosen, slacks = zip(*(lowest(head, count) for head in norms), strict=True)
    return torch.stack(chosen), min(slacks)


def lowest(norms: Tensor, count: int) -> tuple[Tensor, float]:
    """The rows of the `count` lowest of norms (n,), lower row first among equals.

    Returns rows (count,) int64 ascending, and the gap at the edge relative to the higher norm.
    Where the edge lies among equals, the gap is that to the nearest other norm, as in `fastkv.top`.
    """
    order = norms.argsort(stable=True)
    kept, dropped = norms[order[:count]], norms[order[count:]]
    slack = float("inf")
    if len(kept) and len(dropped):
        last, best = kept[-1], dropped[0]
        pairs = [(last, best)]
        if last == best:
            pairs = [(a, last) for a in kept[kept < last][-1:]]
            pairs += [(last, b) for b in dropped[dropped > last][:1]]
        slack = min((float((b - a) / b) for a, b in pairs), default=slack)
    return order[:count].sort().values, slack
