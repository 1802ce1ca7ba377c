"""Dense reference for retention that looks ahead: drafted tokens score the prompt's keys, too.

The draft is greedy, one dense decode step a token behind the whole prompt. Then prompt and draft
are run once more in one pass, whose attention probabilities choose what stays of the prompt. Of the
draft nothing stays, and the answer's tokens are decoded from the prompt's end.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import criticalkv, fastkv
from .criticalkv import Critical
from .fastkv import Context, Keep, KeptResult, block, decode, load
from .masked import embed, layers_of, log_softmax, output_weight
from .pyramidkv import Pyramid


@dataclass(frozen=True)
class Lookahead:
    """`keep`, chosen by the window and `count` drafted tokens behind it."""

    keep: Keep | Critical | Pyramid
    count: int

    def caps(self, layers: int, prompt_len: int) -> list[int]:
        """The most rows of the prompt that a KV head retains, by layer."""
        if isinstance(self.keep, Pyramid):
            return self.keep.caps(layers, prompt_len)
        return [self.keep.cap(prompt_len)] * layers


@torch.no_grad()
def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], policy: Lookahead
) -> KeptResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    layers: Any = layers_of(model)
    keep, total = policy.keep, len(prompt)
    caps = policy.caps(len(layers), total)
    drafted, margin = [], float("inf")
    if min(caps) < total:
        drafted, margin = draft(model, prompt, policy.count)
    tokens = [*prompt, *drafted]
    positions = torch.arange(len(tokens))
    context = Context([], total, [], list(range(total)), margin)
    by_values = isinstance(keep, Critical) or getattr(keep, "score", "") == "critical"
    hidden = embed(model, tokens)
    for layer, cap in zip(layers, caps, strict=True):
        hidden, key, value, probs = block(model, layer, hidden, positions, None)
        rows, slack = positions.expand(key.shape[0], -1), float("inf")
        if drafted:
            more = len(drafted)
            by: dict[str, int] = {"window": keep.window + more, "kv_budget": cap + more}
            by["kernel"] = keep.kernel
            if by_values:
                weight = output_weight(layer)
                rows, slack = criticalkv.retain(probs, value, weight, len(tokens), Critical(**by))
            else:
                rows, slack = fastkv.retain(probs, key.shape[0], positions, len(tokens), Keep(**by))
            rows = rows[:, :-more]
        context.slack = min(context.slack, slack)
        context.retained.append(rows.tolist())
        gather = rows[:, :, None].expand(-1, -1, key.shape[2])
        context.stored.append((key.gather(1, gather), value.gather(1, gather)))
    found = [log_softmax(model, hidden[total - 1 : total])]
    if generated[:-1]:
        found.append(decode(model, context, generated[:-1]))
    return context.result(list(generated), found)


def draft(model: PreTrainedModel, prompt: list[int], count: int) -> tuple[list[int], float]:
    """`count` greedy tokens behind `prompt`, and the least lead of any over the next best."""
    positions, stored = torch.arange(len(prompt)), []
    hidden = embed(model, prompt)
    for layer in layers_of(model):
        hidden, key, value, _ = block(model, layer, hidden, positions, None)
        stored.append((key, value))
    context = Context(stored, len(prompt), [], [], float("inf"))
    row, tokens, margin = log_softmax(model, hidden[-1:]), [], float("inf")
    for _ in range(count):
        tokens.append(int(row.argmax()))
        margin = min(margin, lead(row))
        row = decode(model, context, tokens[-1:])
    return tokens, margin


def lead(row: Tensor) -> float:
    """How far the best of (1, V) is ahead of the next one."""
    best = row[0].topk(2).values
    return float(best[0] - best[1])
