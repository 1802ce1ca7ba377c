"""Dense reference for PyramidKV: SnapKV's retention with fewer rows in higher layers.

Source: PyramidKV, arXiv 2406.02069, whose budgets fall linearly (an arithmetic sequence) from the
bottom layer to the top one. Here the layers of a stage share a budget, and what a stage's rounding
leaves goes to the stage above it. Prefill is full attention in every layer.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import criticalkv
from .criticalkv import Critical
from .fastkv import Context, Keep, KeptResult, block, decode, load, retain
from .masked import embed, layers_of, log_softmax, output_weight


@dataclass(frozen=True)
class Pyramid:
    """How many rows a KV head of each layer retains, and what scores them."""

    kv_rate: float = 0.1  # the mean over the layers
    kv_budget: int | None = None  # the mean in tokens; if given, the rate is ignored
    kv_floor: int = 0  # the least mean that the rate gives
    window: int = 8
    kernel: int = 7
    beta: int = 20  # the mean budget outside the window is `beta` times the top layer's
    groups: int = 8  # the most stages that the layers are cut into
    score: str = "attention"  # or "critical": half of the rows by what values do, too

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"window={self.window} must be >= 1 and kernel={self.kernel} be odd")
        if self.beta < 1 or self.groups < 1:
            raise ValueError(f"beta={self.beta} and groups={self.groups} must be >= 1")

    def mean(self, prompt_len: int) -> int:
        """The rows that a KV head retains on average over the layers, the window included."""
        budget = max(int(prompt_len * self.kv_rate), self.kv_floor)
        if self.kv_budget is not None:
            budget = self.kv_budget
        return min(max(budget, self.window), prompt_len)

    def ideals(self, layers: int, prompt_len: int) -> list[Fraction]:
        """The linearly falling budgets outside the window, by layer, before any rounding."""
        share, most = self.mean(prompt_len) - self.window, prompt_len - self.window
        low = Fraction(share) / Fraction(self.beta)
        high = 2 * share - low
        if high > most:
            low, high = Fraction(2 * share - most), Fraction(most)
        if layers == 1:
            return [Fraction(share)]
        return [high - (high - low) * layer / (layers - 1) for layer in range(layers)]

    def caps(self, layers: int, prompt_len: int) -> list[int]:
        """The most rows that a KV head retains, by layer, the window included."""
        if prompt_len <= self.window:
            return [prompt_len] * layers
        ideals, size = self.ideals(layers, prompt_len), ceil(layers / self.groups)
        caps, carried = [], Fraction(0)
        for start in range(0, layers, size):
            stage = ideals[start : start + size]
            ideal = carried + sum(stage)
            each = floor(ideal / len(stage))
            carried = ideal - each * len(stage)
            caps += [min(self.window + each, prompt_len)] * len(stage)
        return caps


def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], pyramid: Pyramid
) -> KeptResult:
    """The distributions that `generated` was drawn from, given these tokens."""
    model = load(model)
    context, row = prefill(model, prompt, pyramid)
    rows = [row, decode(model, context, generated[:-1])] if len(generated) > 1 else [row]
    return context.result(list(generated), rows)


@torch.no_grad()
def prefill(model: PreTrainedModel, prompt: list[int], pyramid: Pyramid) -> tuple[Context, Tensor]:
    """The context after `prompt`, and the log-softmax (1, V) of its last token."""
    layers: Any = layers_of(model)
    total = len(prompt)
    context = Context([], total, [], list(range(total)), float("inf"))
    positions = torch.arange(total)
    hidden = embed(model, prompt)  # (rows, hidden)
    for layer, cap in zip(layers, pyramid.caps(len(layers), total), strict=True):
        hidden, key, value, probs = block(model, layer, hidden, positions, None)
        by: dict[str, int] = {"kv_budget": cap, "window": pyramid.window, "kernel": pyramid.kernel}
        if pyramid.score == "critical":
            weight = output_weight(layer)
            rows, slack = criticalkv.retain(probs, value, weight, total, Critical(**by))
        else:
            rows, slack = retain(probs, key.shape[0], positions, total, Keep(**by))
        context.slack = min(context.slack, slack)
        context.retained.append(positions[rows].tolist())
        gather = rows[:, :, None].expand(-1, -1, key.shape[2])
        context.stored.append((key.gather(1, gather), value.gather(1, gather)))
    return context, log_softmax(model, hidden[-1:])
