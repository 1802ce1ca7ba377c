"""The SwiftKV reference against full attention, and against one token at a time by hand."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from . import speed, swiftkv
from .conftest import ATOL, CLEAR, LAYERS, STEPS, change, prompt_of
from .swiftkv import Swift

GENERATED = prompt_of(STEPS, seed=99)


@pytest.mark.parametrize("length", [1, 9, 65])
def test_one_layer_above_is_full(model: PreTrainedModel, length: int) -> None:
    """The first layer above the cutoff would get that state as its input anyway."""
    prompt = prompt_of(length)
    full = speed.score(model, prompt, GENERATED, cutoff=None)
    result = swiftkv.score(model, prompt, GENERATED, Swift(LAYERS - 1))
    assert change(result, full).max() < ATOL


@pytest.mark.parametrize("cutoff", range(1, LAYERS - 1))
def test_lower_cutoffs_are_not(model: PreTrainedModel, cutoff: int) -> None:
    prompt = prompt_of(40)
    full = speed.score(model, prompt, GENERATED, cutoff=None)
    other = swiftkv.score(model, prompt, GENERATED, Swift(cutoff + 1))
    result = swiftkv.score(model, prompt, GENERATED, Swift(cutoff))
    assert change(result, full).min() > CLEAR and change(result, other).min() > CLEAR


@pytest.mark.parametrize("cutoff", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 30])
def test_by_hand(model: PreTrainedModel, cutoff: int, length: int) -> None:
    """Entries in lists; above the cutoff rows are computed for the answer alone."""
    prompt = prompt_of(length, seed=3)
    result = swiftkv.score(model, prompt, GENERATED, Swift(cutoff))
    rows = by_hand(model, prompt, GENERATED, cutoff)
    assert (result.logprobs - rows).abs().max() < ATOL


def test_generate_is_scored_alike(llama: PreTrainedModel) -> None:
    prompt = prompt_of(20)
    generated = swiftkv.generate(llama, prompt, Swift(2), max_tokens=STEPS)
    scored = swiftkv.score(llama, prompt, generated.tokens, Swift(2))
    assert scored.argmax == generated.tokens
    assert change(generated, scored).max() < ATOL


def test_refuses_what_it_cannot_cut(llama: PreTrainedModel) -> None:
    for cutoff in (0, LAYERS):
        with pytest.raises(ValueError, match="does not lie within"):
            swiftkv.score(llama, [3, 4], [5], Swift(cutoff))


@torch.no_grad()
def by_hand(model: PreTrainedModel, prompt: list[int], generated: list[int], cutoff: int) -> Tensor:
    """(S, V) log-softmax of each generated token, one row at a time."""
    layers, n = model.model.layers, len(prompt)
    entries: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    rows = []
    for position, token in enumerate(prompt + generated[:-1]):
        hidden = model.model.embed_tokens(torch.tensor([token]))  # (1, hidden)
        for index, layer in enumerate(layers):
            if index == cutoff and position < n:
                for above in range(cutoff, len(layers)):
                    _, *entry = _heads(model, layers[above], hidden, position)
                    entries[above].append(tuple(entry))
            if index >= cutoff and position < n - 1:
                break
            query, *entry = _heads(model, layer, hidden, position)
            if index < cutoff or position >= n:
                entries[index].append(tuple(entry))
            keys, values = (torch.cat(parts, dim=1) for parts in zip(*entries[index], strict=True))
            assert keys.shape[1] == position + 1
            shared = query.shape[0] // keys.shape[0]
            mixed = scaled_dot_product_attention(
                query, keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)
            )
            hidden = hidden + layer.self_attn.o_proj(mixed.reshape(1, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        else:
            if position >= n - 1:
                rows.append(model.lm_head(model.model.norm(hidden)).log_softmax(dim=-1))
    return torch.cat(rows)


def _heads(model: PreTrainedModel, layer, hidden: Tensor, position: int) -> tuple[Tensor, ...]:
    """Query, key (heads, 1, D), rotated, and value of one token."""
    attention, normed = layer.self_attn, layer.input_layernorm(hidden)
    query, key, value = (
        projection(normed).view(-1, 1, attention.head_dim)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    cos, sin = model.model.rotary_emb(hidden[None], torch.tensor([[position]]))
    query, key = (part[0] for part in apply_rotary_pos_emb(query[None], key[None], cos, sin))
    return query, key, value
