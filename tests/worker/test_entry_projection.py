"""A layer's keys and values without the layer: plain weights are cut, packed ones run whole."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_kvx.models.projection import store_entries

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 24
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


class Joint:
    """What is read of vLLM's joint projection; calls: how often it ran whole."""

    def __init__(self, weight: Tensor, bias: Tensor | None, is_packed: bool) -> None:
        self.output_size_per_partition, self.bias = Q + 2 * KV, bias
        self.quant_method = UnquantizedLinearMethod()
        self.weight = torch.empty(0) if is_packed else weight
        self._whole, self.calls = weight, 0

    def __call__(self, rows: Tensor) -> tuple[Tensor, None]:
        self.calls += 1
        return torch.nn.functional.linear(rows, self._whole, self.bias), None


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_cut_and_whole_store_the_same(has_bias: bool, has_norm: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(Q + 2 * KV, HIDDEN, generator=generator)
    bias = torch.randn(Q + 2 * KV, generator=generator) if has_bias else None
    states, slots = torch.randn(5, HIDDEN, generator=generator), torch.tensor([3, 1, 4, 0, 9])
    positions = torch.tensor([7, 8, 9, 2, 3])
    written: list[tuple[Tensor, Tensor]] = []

    def write(layer: Any, key: Tensor, value: Tensor, cache: str, where: Tensor) -> None:
        assert (layer, cache) == (paged, "the cache") and where is slots
        written.append((key, value))

    paged: Any = SimpleNamespace(num_kv_heads=KV_HEADS, head_size=HEAD_DIM, kv_cache="the cache")
    paged.impl = SimpleNamespace(do_kv_cache_update=write)
    joints = [Joint(weight, bias, is_packed) for is_packed in (False, True)]
    for joint in joints:
        attention: Any = SimpleNamespace(qkv_proj=joint, q_size=Q, kv_size=KV, attn=paged)
        attention.num_kv_heads, attention.head_dim = KV_HEADS, HEAD_DIM
        attention.rotary_emb = lambda at, key: (key + at[:, None], None)
        if has_norm:
            attention.k_norm = lambda key: key / key.norm(dim=-1, keepdim=True)
        layer: Any = SimpleNamespace(self_attn=attention, input_layernorm=lambda rows: 2 * rows)
        store_entries(layer, states, positions, slots)
    assert [joint.calls for joint in joints] == [0, 1]

    both = torch.nn.functional.linear(2 * states, weight, bias)[:, Q:].view(5, -1, HEAD_DIM)
    key, value = both[:, :KV_HEADS], both[:, KV_HEADS:]
    if has_norm:
        key = key / key.norm(dim=-1, keepdim=True)
    for ours in written:
        torch.testing.assert_close(ours, (key + positions[:, None, None], value))
