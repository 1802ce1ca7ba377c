"""Dense reference for GemFilter: an early layer chooses the tokens that the model then runs.

Source: GemFilter, arXiv 2409.17422. The prompt runs up to the filter layer, whose last queries
choose tokens. Only these run again, from the embedding through all layers, and every layer stores
all of them. This differs from the paper's code in two ways: the chosen tokens keep their positions,
where that code numbers them anew, and SnapKV's saliency scores them (attention probabilities, max
pooling), where that code scores them by inner products.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .fastkv import Context, KeptResult, block, decode, load, saliency, top
from .masked import embed, layers_of, log_softmax


@dataclass(frozen=True)
class Filter:
    """The layer that chooses, and how many tokens."""

    layer: int  # the last layer that runs every token
    rate: float = 0.1
    window: int = 1
    kernel: int = 5
    kv_floor: int = 0  # the least that the rate chooses

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"window={self.window} must be >= 1 and kernel={self.kernel} be odd")

    def most(self, prompt_len: int) -> int:
        """The most tokens that run again, the window included."""
        return max(int(prompt_len * self.rate), self.window, self.kv_floor)


def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], gem: Filter
) -> KeptResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    context, row = prefill(model, prompt, gem)
    rows = [row, decode(model, context, generated[:-1])] if len(generated) > 1 else [row]
    return context.result(list(generated), rows)


@torch.no_grad()
def prefill(model: PreTrainedModel, prompt: list[int], gem: Filter) -> tuple[Context, Tensor]:
    """The context after `prompt`, and the log-softmax (1, V) of its last token."""
    layers: Any = layers_of(model)
    if not 0 <= gem.layer < len(layers):
        raise ValueError(f"{gem}: the filter is not one of the {len(layers)} layers")
    embedded = embed(model, prompt)  # (N, hidden)
    positions, slack = select(model, embedded, gem)
    context = Context([], len(prompt), [], positions.tolist(), slack)
    hidden = embedded[positions]
    for layer in layers:
        hidden, key, value, _ = block(model, layer, hidden, positions, None)
        context.stored.append((key, value))
        context.retained.append([positions.tolist()] * key.shape[0])
    return context, log_softmax(model, hidden[-1:])


def select(model: PreTrainedModel, hidden: Tensor, gem: Filter) -> tuple[Tensor, float]:
    """Positions of the tokens that run again, int64 ascending, and the slack of the choice.

    hidden (N, hidden) is the embedded prompt.
    """
    layers: Any = layers_of(model)
    total = len(hidden)
    positions, most = torch.arange(total), gem.most(total)
    if total <= most:
        return positions, float("inf")
    for layer in layers[: gem.layer + 1]:
        hidden, _, _, probs = block(model, layer, hidden, positions, None)
    (scores,), (unpooled,) = (saliency(probs, 1, gem.window, width) for width in (gem.kernel, 1))
    return top(scores, most - gem.window, gem.window, unpooled)
