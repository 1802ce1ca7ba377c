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
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .fastkv import Context
from .speed import Result, load


@dataclass(frozen=True)
class Swift:
    """Layers from `cutoff` on take the prompt's keys and values from the state before them."""

    cutoff: int


class _Replaced(DynamicCache):
    """What attention reads: in layers of `entries` the prompt's keys and values are these.

    read: by layer, all keys and values (1, G, n, D).
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[int, tuple[Tensor, Tensor]] = {}
        self.read: list[tuple[Tensor, Tensor]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self.entries:
            key, value = self.entries[layer_idx]
            key_states = torch.cat([key, key_states[:, :, key.shape[2] :]], dim=2)
            value_states = torch.cat([value, value_states[:, :, value.shape[2] :]], dim=2)
        self.read.append((key_states, value_states))
        return key_states, value_states


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
    layers: Any = model.model.layers
    if not 0 < swift.cutoff < len(layers):
        raise ValueError(f"{swift} does not lie within the {len(layers)} layers")
    total = len(sequence)
    seen = torch.ones(total, total, dtype=torch.bool).tril()
    mask = torch.zeros(total, total).masked_fill(~seen, float("-inf"))[None, None]
    positions, cache = torch.arange(total)[None], _Replaced()
    hidden = model.model.embed_tokens(torch.tensor([sequence]))  # (1, n, hidden)
    rotary = model.model.rotary_emb(hidden, positions)
    for index, layer in enumerate(layers):
        if index == swift.cutoff:
            prompt_rotary = tuple(part[:, :prompt_len] for part in rotary)
            for above in range(index, len(layers)):
                cache.entries[above] = project(layers[above], hidden[:, :prompt_len], prompt_rotary)
        hidden = layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotary,
            past_key_values=cache,
        )
    return model.lm_head(model.model.norm(hidden)[0]).log_softmax(dim=-1), cache.read


def project(layer: Any, hidden: Tensor, rotary: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Keys, rotated, and values (1, G, n, D) that `layer` would make of hidden (1, n, hidden)."""
    attention, normed = layer.self_attn, layer.input_layernorm(hidden)
    shape = (1, hidden.shape[1], -1, attention.head_dim)
    key, value = attention.k_proj(normed).view(shape), attention.v_proj(normed).view(shape)
    if hasattr(attention, "k_norm"):
        key = attention.k_norm(key)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    _, key = apply_rotary_pos_emb(key, key, *rotary)
    return key, value
