"""Dense reference for StructKV's propagation with SnapKV's retention.

Centrality over the layers up to the pivot chooses the tokens that run through the layers above, as
in structkv.py. Every KV head of every layer retains rows by its own pooled saliency, as in
fastkv.py; above the pivot a row's neighbours in the pooling are the propagated rows next to it.
Another method can retain in SnapKV's place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import fastkv
from .fastkv import Context, Keep, KeptResult, block, decode, load, top
from .masked import embed, layers_of, log_softmax
from .structkv import Struct, local_saliency

# Of a layer's rows: attention probabilities (H, n, n), rotated keys (G, n, D) and positions (n,);
# then the prompt's length and the layer's index -> rows to keep (G, kept) int64 ascending, and the
# slack of the choice.
Retain = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, float]]


@dataclass(frozen=True)
class StructSnap:
    """The pivot, what propagates beyond it, and what every layer retains."""

    pivot: int  # the last layer that runs every token
    struct_rate: float = 0.2
    decay: float = 0.9
    window: int = 8  # for centrality and for retention
    kv_rate: float = 0.1
    kv_budget: int | None = None  # tokens; if given, the rate is ignored
    kernel: int = 7
    retain: Retain | None = None  # if given, rate, budget and kernel are ignored

    def __post_init__(self) -> None:
        _ = self.struct, self.keep  # They check what they are given.

    @property
    def struct(self) -> Struct:
        """What propagates."""
        return Struct(self.pivot, self.struct_rate, window=self.window, decay=self.decay)

    @property
    def keep(self) -> Keep:
        """What SnapKV retains."""
        return Keep(
            kv_rate=self.kv_rate, kv_budget=self.kv_budget, window=self.window, kernel=self.kernel
        )


def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], snap: StructSnap
) -> KeptResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    context, row = prefill(model, prompt, snap)
    rows = [row, decode(model, context, generated[:-1])] if len(generated) > 1 else [row]
    return context.result(list(generated), rows)


@torch.no_grad()
def prefill(model: PreTrainedModel, prompt: list[int], snap: StructSnap) -> tuple[Context, Tensor]:
    """The context after `prompt`, and the log-softmax (1, V) of its last token."""
    layers: Any = layers_of(model)
    total, window, most = len(prompt), snap.window, snap.struct.most(len(prompt))
    if not 0 <= snap.pivot < len(layers):
        raise ValueError(f"{snap}: the pivot is not one of the {len(layers)} layers")
    context = Context([], total, [], list(range(total)), float("inf"))
    positions = torch.arange(total)
    hidden = embed(model, prompt)  # (rows, hidden)
    centrality = torch.zeros(max(total - window, 0), dtype=torch.float64)
    for index, layer in enumerate(layers):
        hidden, key, value, probs = block(model, layer, hidden, positions, None)

        if snap.retain is not None:
            rows, slack = snap.retain(probs, key, positions, total, index)
        else:
            rows, slack = fastkv.retain(probs, key.shape[0], positions, total, snap.keep)
        context.slack = min(context.slack, slack)
        context.retained.append(positions[rows].tolist())
        gather = rows[:, :, None].expand(-1, -1, key.shape[2])
        context.stored.append((key.gather(1, gather), value.gather(1, gather)))

        if index <= snap.pivot:
            centrality = snap.decay * centrality + local_saliency(probs, window)
        if index == snap.pivot < len(layers) - 1 and total > most:
            chosen, slack = top(centrality, most - window, window)
            context.slack = min(context.slack, slack)
            hidden, positions = hidden[chosen], positions[chosen]
            context.propagated = positions.tolist()
    return context, log_softmax(model, hidden[-1:])
