"""Dense reference for SelfOnly-K: a transformers model, one visibility below and one above.

Below the cutoff attention is full. From the cutoff on every token sees the anchors, the first
prompt tokens, that are not after it, and itself. Positions are never renumbered.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import masked
from .speed import Result, load


@dataclass(frozen=True)
class Alone:
    """From `cutoff` on a token sees the first `anchors` prompt tokens and itself."""

    cutoff: int
    anchors: int = 1


def score(
    model: str | Path | PreTrainedModel, prompt: list[int], generated: list[int], alone: Alone
) -> Result:
    """The distributions that `generated` was drawn from, given these tokens, in one dense pass."""
    rows = forward(load(model), prompt + generated[:-1], len(prompt), alone)
    return Result(list(generated), rows[len(prompt) - 1 :])


@torch.no_grad()
def forward(model: PreTrainedModel, sequence: list[int], prompt_len: int, alone: Alone) -> Tensor:
    """(n, V) float32 log-softmax of all rows.

    Prompt tokens between anchors and the last one are computed too; nobody reads them.
    """
    count = len(masked.layers_of(model))
    if not 0 < alone.cutoff < count or alone.anchors < 0:
        raise ValueError(f"{alone} does not suit {count} layers")
    total = len(sequence)
    row, column = torch.arange(total)[:, None], torch.arange(total)[None]
    is_anchor = column < min(alone.anchors, prompt_len)
    sees = (column <= row) & (is_anchor | (column == row))
    lower = column <= row
    return masked.forward(model, sequence, lambda layer: lower if layer < alone.cutoff else sees)
