"""A layer's keys, values and queries, projected without running the layer."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod


def store_entries(layer: nn.Module, states: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Writes the keys and values that `layer` makes of `states` into its KV cache.

    As in the layer itself: its input norm, its projections with their biases, its norm of keys if
    it has one, rotary positions, and its attention implementation's own write, with its scales.
    With several ranks each projects its own KV heads.

    Args:
        layer: a decoder layer with `input_layernorm` and `self_attn`, as ``models/registry`` lists.
        states: (n, hidden) sum of hidden states and residual. positions: (n,) int64.
        slots: (n,) int64.
    """
    attention: Any = layer.self_attn
    normed = layer.input_layernorm(states)  # type: ignore[operator]
    projected = _project(attention.qkv_proj, normed, slice(attention.q_size, None))
    key, value = projected.split(attention.kv_size, dim=-1)
    key = _normed(key, getattr(attention, "k_norm", None), attention.head_dim)
    key, _ = attention.rotary_emb(positions, key)
    paged = attention.attn
    shape = -1, paged.num_kv_heads, paged.head_size
    paged.impl.do_kv_cache_update(paged, key.view(shape), value.view(shape), paged.kv_cache, slots)


def queries_of(layer: nn.Module, states: Tensor, positions: Tensor) -> Tensor:
    """The queries, (n, H, D), that `layer` makes of `states`; arguments as `store_entries`."""
    attention: Any = layer.self_attn
    normed = layer.input_layernorm(states)  # type: ignore[operator]
    query = _project(attention.qkv_proj, normed, slice(attention.q_size))
    query = _normed(query, getattr(attention, "q_norm", None), attention.head_dim)
    query, _ = attention.rotary_emb(positions, query)
    if getattr(attention, "do_llama_4_scaling", False):  # Mistral's, for long contexts.
        query = (query * attention._get_llama_4_attn_scale(positions)).to(query.dtype)
    return query.view(-1, attention.attn.num_heads, attention.attn.head_size)


def _normed(rows: Tensor, norm: Any, head_dim: int) -> Tensor:
    """`rows`, (n, heads * head_dim), each head normalised by itself; as they are without `norm`."""
    return rows if norm is None else norm(rows.view(len(rows), -1, head_dim)).view(rows.shape)


def _project(linear: Any, normed: Tensor, part: slice) -> Tensor:
    """(n, size) of the rows `part` of a joint projection of queries, keys and values."""
    plain = isinstance(linear.quant_method, UnquantizedLinearMethod)
    # Weights that are packed for a kernel cannot be cut: all are projected.
    if plain and linear.weight.shape[0] == linear.output_size_per_partition:
        bias = None if linear.bias is None else linear.bias[part]
        return torch.nn.functional.linear(normed, linear.weight[part], bias)
    projected, _ = linear(normed)
    return projected[:, part]
