"""A layer's keys, values and queries, projected without running the layer."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_kvx.models.stream import Projected


def attention_of(layer: nn.Module) -> Attention:
    """The attention of a decoder layer."""
    found = [module for module in layer.modules() if isinstance(module, Attention)]
    assert len(found) == 1, f"expected one attention per layer, found {len(found)}"
    return found[0]


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
    shape = -1, attention.attn.num_kv_heads, attention.attn.head_size
    write_entries(layer, key.view(shape), value.view(shape), slots)


def write_entries(layer: nn.Module, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Writes keys and values, (n, KV heads, D), that `layer` has made, into its KV cache."""
    paged: Any = layer.self_attn.attn  # type: ignore[union-attr]
    paged.impl.do_kv_cache_update(paged, key, value, paged.kv_cache, slots)


def queries_of(layer: nn.Module, states: Tensor, positions: Tensor) -> Tensor:
    """The queries, (n, H, D), that `layer` makes of `states`; arguments as `store_entries`."""
    attention: Any = layer.self_attn
    normed = layer.input_layernorm(states)  # type: ignore[operator]
    query = _project(attention.qkv_proj, normed, slice(attention.q_size))
    query = _normed(query, getattr(attention, "q_norm", None), attention.head_dim)
    query, _ = attention.rotary_emb(positions, query)
    query = _scaled(attention, query, positions)
    return query.view(-1, attention.attn.num_heads, attention.attn.head_size)


def projected_of(layer: nn.Module, states: Tensor, positions: Tensor) -> Projected:
    """What the attention of `layer` takes of `states`; arguments as `store_entries`.

    As vLLM hands it over: its backend may want queries quantized.
    """
    attention: Any = layer.self_attn
    paged = attention.attn
    projected, _ = attention.qkv_proj(layer.input_layernorm(states))  # type: ignore[operator]
    sizes = attention.q_size, attention.kv_size, attention.kv_size
    query, key, value = projected.split(sizes, dim=-1)
    query = _normed(query, getattr(attention, "q_norm", None), attention.head_dim)
    key = _normed(key, getattr(attention, "k_norm", None), attention.head_dim)
    query, key = attention.rotary_emb(positions, query, key)
    query = _scaled(attention, query, positions)
    if paged.query_quant is not None:
        query, _ = paged.query_quant(query, paged._q_scale)
    return Projected(
        query.view(-1, paged.num_heads, paged.head_size),
        key.view(-1, paged.num_kv_heads, paged.head_size),
        value.view(-1, paged.num_kv_heads, paged.head_size_v),
    )


def _scaled(attention: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Mistral scales queries for long contexts."""
    if not getattr(attention, "do_llama_4_scaling", False):
        return query
    scaled: Tensor = query * attention._get_llama_4_attn_scale(positions)
    return scaled.to(query.dtype)


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
