"""Dense reference for retention that waits for generated tokens: they score the prompt's keys too.

Nothing of the prompt goes before `after` generated tokens are in, and none of these ever does. The
first generated tokens are run behind the prompt in one pass, which sees all.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from . import criticalkv, fastkv
from .criticalkv import Critical
from .fastkv import Context, Keep, KeptResult, block, decode, load
from .masked import embed, layers_of, log_softmax, output_weight
from .pyramidkv import Pyramid


@dataclass(frozen=True)
class After:
    """`keep`, whose rates are of the prompt alone, once `after` generated tokens are in."""

    keep: Keep | Critical | Pyramid
    after: int

    def caps(self, layers: int, prompt_len: int) -> list[int]:
        """The most rows of the prompt that a KV head retains, by layer."""
        if isinstance(self.keep, Pyramid):
            return self.keep.caps(layers, prompt_len)
        return [self.keep.cap(prompt_len)] * layers


@torch.no_grad()
def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], policy: After
) -> KeptResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    # The last token is answered and never run.
    first, rest = generated[: policy.after], generated[policy.after : -1]
    first = first[: len(generated) - 1]
    tokens = [*prompt, *first]
    context = Context([], len(tokens), [], list(range(len(tokens))), float("inf"))
    positions = torch.arange(len(tokens))
    keep, more = policy.keep, policy.after
    by_values = isinstance(keep, Critical) or getattr(keep, "score", "") == "critical"
    hidden = embed(model, tokens)
    layers: Any = layers_of(model)
    caps = policy.caps(len(layers), len(prompt))
    for layer, cap in zip(layers, caps, strict=True):
        hidden, key, value, probs = block(model, layer, hidden, positions, None)
        rows, slack = positions.expand(key.shape[0], -1), float("inf")
        if len(first) == more:
            by: dict[str, int] = {"window": keep.window + more, "kv_budget": cap + more}
            by["kernel"] = keep.kernel
            if by_values:
                weight = output_weight(layer)
                rows, slack = criticalkv.retain(probs, value, weight, len(tokens), Critical(**by))
            else:
                rows, slack = fastkv.retain(probs, key.shape[0], positions, len(tokens), Keep(**by))
        context.slack = min(context.slack, slack)
        context.retained.append(rows.tolist())
        gather = rows[:, :, None].expand(-1, -1, key.shape[2])
        context.stored.append((key.gather(1, gather), value.gather(1, gather)))
    found = [log_softmax(model, hidden[len(prompt) - 1 :])]
    if rest:
        found.append(decode(model, context, rest))
    return context.result(list(generated), found)
