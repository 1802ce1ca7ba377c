"""Dense reference for CriticalKV: SnapKV's budget, half of it spent by what values do.

Source: arXiv 2502.03805, Identify Critical KV Cache in LLM Inference from an Output Perturbation
Perspective, Algorithm 1 with alpha = 0.5, over SnapKV's attention. Outside the window the first
half of the budget is chosen by attention, the rest by attention times the norm of the projected
value, both the mean over the query heads of the KV head. The norm is L2, where the paper has L1.
Every value is projected by the model's own weights here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .fastkv import Context, KeptResult, block, decode, load, saliency, top
from .masked import embed, layers_of, log_softmax, output_weight

EPSILON = 1e-4  # added to a mean weight of attention


@dataclass(frozen=True)
class Critical:
    """How many rows each KV head retains, by what, and which rows there are above a TSP layer."""

    kv_rate: float = 0.1
    kv_budget: int | None = None  # tokens; if given, the rate is ignored
    kv_floor: int = 0  # the least that the rate keeps
    window: int = 8
    kernel: int = 7
    tsp_layer: int | None = None  # FastKV's propagation
    tsp_rate: float = 1.0

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"window={self.window} must be >= 1 and kernel={self.kernel} be odd")

    def cap(self, prompt_len: int) -> int:
        """The most rows that a KV head retains, the window included."""
        if self.kv_budget is not None:
            return max(self.kv_budget, self.window)
        return max(int(prompt_len * self.kv_rate), self.kv_floor, self.window)


def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], policy: Critical
) -> KeptResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    context, row = prefill(model, prompt, policy)
    rows = [row, decode(model, context, generated[:-1])] if len(generated) > 1 else [row]
    return context.result(list(generated), rows)


@torch.no_grad()
def prefill(model: PreTrainedModel, prompt: list[int], policy: Critical) -> tuple[Context, Tensor]:
    """The context after `prompt`, and the log-softmax (1, V) of its last token."""
    layers: Any = layers_of(model)
    total = len(prompt)
    context = Context([], total, [], list(range(total)), float("inf"))
    positions = torch.arange(total)
    hidden = embed(model, prompt)  # (rows, hidden)
    for index, layer in enumerate(layers):
        hidden, key, value, probs = block(model, layer, hidden, positions, None)
        rows, slack = retain(probs, value, output_weight(layer), total, policy)
        context.slack = min(context.slack, slack)
        context.retained.append(positions[rows].tolist())
        gather = rows[:, :, None].expand(-1, -1, key.shape[2])
        context.stored.append((key.gather(1, gather), value.gather(1, gather)))

        most = max(int(total * policy.tsp_rate), policy.window)
        if index == policy.tsp_layer and index < len(layers) - 1 and total > most:
            (scores,), (unpooled,) = (
                saliency(probs, 1, policy.window, width) for width in (policy.kernel, 1)
            )
            chosen, slack = top(scores, most - policy.window, policy.window, unpooled)
            context.slack = min(context.slack, slack)
            hidden, positions = hidden[chosen], positions[chosen]
            context.propagated = positions.tolist()
    return context, log_softmax(model, hidden[-1:])


def retain(
    probs: Tensor, value: Tensor, weight: Tensor, prompt_len: int, policy: Critical
) -> tuple[Tensor, float]:
    """Rows that each KV head keeps, (G, kept) int64 ascending, and the slack of the choice.

    probs (H, n, n) and value (G, n, D) are of the rows that the layer computed; weight (hidden,
    H * D) is that of the output projection.
    """
    (heads, count, _), kv_heads = probs.shape, value.shape[0]
    cap, window = policy.cap(prompt_len), policy.window
    if count <= cap:
        return torch.arange(count).expand(kv_heads, -1), float("inf")
    scores, unpooled = (saliency(probs, kv_heads, window, width) for width in (policy.kernel, 1))
    shared = heads // kv_heads
    first = (cap - window) // 2
    chosen, slack = [], float("inf")
    for head in range(kv_heads):
        lengths = [
            (value[head].double() @ part.double().T).norm(dim=1)
            for part in weight.chunk(heads, dim=1)[head * shared : (head + 1) * shared]
        ]
        norm = torch.stack(lengths).mean(dim=0)[: count - window]  # (n - window,)
        early, gap = top(scores[head], first, 0, unpooled[head])
        slack = min(slack, gap)
        mean = scores[head] / (shared * window)
        rest = torch.tensor(
            [row for row in range(count - window) if row not in set(early.tolist())]
        )
        product = (mean + EPSILON) * norm
        late, gap = top(product[rest], cap - window - first, 0, unpooled[head][rest])
        slack = min(slack, gap)
        tail = torch.arange(count - window, count)
        chosen.append(torch.cat([early, rest[late], tail]).sort().values)
    return torch.stack(chosen), slack
