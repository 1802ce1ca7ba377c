"""Dense reference for SelfOnly-K: transformers' layers, one additive mask below and one above.

Below the cutoff attention is full. From the cutoff on every token sees the anchors, the first
prompt tokens, that are not after it, and itself. Positions are never renumbered.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

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
    if not 0 < alone.cutoff < len(model.model.layers) or alone.anchors < 0:
        raise ValueError(f"{alone} does not suit {len(model.model.layers)} layers")
    total = len(sequence)
    row, column = torch.arange(total)[:, None], torch.arange(total)[None]
    is_anchor = column < min(alone.anchors, prompt_len)
    sees = (column <= row) & (is_anchor | (column == row))
    lower, upper = (
        torch.zeros(total, total).masked_fill(~seen, float("-inf"))[None, None]
        for seen in (column <= row, sees)
    )
    positions = torch.arange(total)[None]
    hidden = model.model.embed_tokens(torch.tensor([sequence]))  # (1, n, hidden)
    rotary = model.model.rotary_emb(hidden, positions)
    for index, layer in enumerate(model.model.layers):
        hidden = layer(
            hidden,
            attention_mask=lower if index < alone.cutoff else upper,
            position_ids=positions,
            position_embeddings=rotary,
        )
    return model.lm_head(model.model.norm(hidden)[0]).log_softmax(dim=-1)
