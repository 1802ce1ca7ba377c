"""Dense reference for SwiftKV without its tuned projections: transformers' layers, over all tokens.

Below the cutoff everything is full attention. From the cutoff on, the keys and values of every
prompt token are replaced: each layer's own input norm and projections applied to the state that
enters the first of these layers. The last prompt token and generated tokens attend to them; what
other prompt tokens compute there is read by nobody. Positions are never renumbered.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .fastkv import Context
from .masked import attention, causal, embed, layers_of, log_softmax, run_layer
from .speed import Result, load


@dataclass(frozen=True)
class Swift:
    """Layers from `cutoff` on take the prompt's keys and values from the state before them."""

    cutoff: int


def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], swift: Swift
) -> Result:
    """The distributions that `generated` was drawn from, given these tokens, in one dense pass."""
    sequence = prompt + generated[:-1]
    rows, _ = forward(load(model), sequence, len(prompt), swift)
    return Result(list(generated), rows[len(prompt) - 1 :])


def generate(
    model: str | Path | PreTrainedModel, prompt: list[int], swift: Swift, *, max_tokens: int
) -> Result:
    """Greedy tokens; the whole sequence is computed again for each."""
    model, sequence, rows = load(model), list(prompt), []
    while len(rows) < max_tokens:
        logprobs, _ = forward(model, sequence, len(prompt), swift)
        rows.append(logprobs[-1:])
        sequence.append(int(rows[-1].argmax()))
    return Result(sequence[len(prompt) :], torch.cat(rows))


def prefill(model: PreTrainedModel, prompt: list[int], swift: Swift) -> tuple[Context, Tensor]:
    """What decode steps see after `prompt`, and the log-softmax (1, V) of its last token."""
    logprobs, read = forward(model, prompt, len(prompt), swift)
    stored = [(key[0], value[0]) for key, value in read]
    everything = list(range(len(prompt)))
    heads = [everything] * len(stored[0][0])
    context = Context(stored, len(prompt), [heads] * len(stored), everything, float("inf"))
    return context, logprobs[-1:]


@torch.no_grad()
def forward(
    model: PreTrainedModel, sequence: list[int], prompt_len: int, swift: Swift
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """(n, V) float32 log-softmax of all rows, and by layer the keys and values (1, G, n, D) read.

    Rows before that of the last prompt token mean nothing.
    """
    layers = layers_of(model)
    if not 0 < swift.cutoff < len(layers):
        raise ValueError(f"{swift} does not lie within the {len(layers)} layers")
    positions, hidden = torch.arange(len(sequence)), embed(model, sequence)  # (n, hidden)
    entries: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, of the prompt
    read: list[tuple[Tensor, Tensor]] = []

    def attend(index: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if index in entries:
            above = key[:, prompt_len:], value[:, prompt_len:]
            key, value = (
                torch.cat(parts, dim=1) for parts in zip(entries[index], above, strict=True)
            )
        read.append((key[None], value[None]))
        return attention(query, key, value, scale, causal(len(sequence), len(sequence)))[0]

    for index, layer in enumerate(layers):
        if index == swift.cutoff:
            for above in range(index, len(layers)):
                part = hidden[:prompt_len], positions[:prompt_len]
                entries[above] = project(model, layers[above], *part)
        hidden = run_layer(model, layer, hidden, positions, attend)
    return log_softmax(model, hidden), read


def project(
    model: PreTrainedModel, layer: Any, hidden: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys, rotated, and values (G, n, D) that `layer` would make of hidden (n, hidden)."""
    made = []

    def take(_index: int, query: Tensor, key: Tensor, value: Tensor, _scale: float) -> Tensor:
        made.append((key, value))
        return torch.zeros_like(query)

    run_layer(model, layer, hidden, positions, take)
    return made[0]
