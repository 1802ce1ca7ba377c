"""A layer's keys and values, projected and stored without running the layer."""

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
    projected = _project(attention.qkv_proj, normed, attention.q_size)
    key, value = projected.split(attention.kv_size, dim=-1)
    key_norm = getattr(attention, "k_norm", None)
    if key_norm is not None:
        by_head = key.view(-1, attention.num_kv_heads, attention.head_dim)
        key = key_norm(by_head).view(key.shape)
    key, _ = attention.rotary_emb(positions, key)
    paged = attention.attn
    shape = -1, paged.num_kv_heads, paged.head_size
    paged.impl.do_kv_cache_update(paged, key.view(shape), value.view(shape), paged.kv_cache, slots)


def _project(linear: Any, normed: Tensor, q_size: int) -> Tensor:
    """(n, 2 * kv_size) of the rows of a joint projection that follow the queries' `q_size`."""
    plain = isinstance(linear.quant_method, UnquantizedLinearMethod)
    # Weights that are packed for a kernel cannot be cut: the queries are projected too.
    if plain and linear.weight.shape[0] == linear.output_size_per_partition:
        bias = None if linear.bias is None else linear.bias[q_size:]
        return torch.nn.functional.linear(normed, linear.weight[q_size:], bias)
    projected, _ = linear(normed)
    return projected[:, q_size:]
