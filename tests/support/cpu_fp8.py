"""An fp8 KV cache on any CPU, for tests: vLLM's own wants AVX-512, and nobody can address it.

Layers whose cache is fp8 store and attend in plain torch, in the layout of vLLM's CPU kernels for
float32. Those that skip it stay with these kernels. All else is vLLM's and ours.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backends import cpu_attn

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.server import validate

DTYPE = torch.float8_e4m3fn
_ISA = "vec"


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take ``kv_cache_dtype="fp8"`` under any policy until the test ends."""
    allowed = tuple(row for row in validate.WITH_RETENTION if "8-bit" not in row.reason)
    assert len(allowed) == len(validate.WITH_RETENTION) - 1
    monkeypatch.setattr(validate, "WITH_RETENTION", allowed)
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: _ISA)
    # From vLLM 0.33 on it is asked.
    taken = classmethod(lambda *_: True)
    monkeypatch.setattr(cpu_attn.CPUAttentionBackend, "supports_kv_cache_dtype", taken)
    builder: Any = cpu_attn.CPUAttentionMetadataBuilder
    impl: Any = cpu_attn.CPUAttentionBackendImpl
    init, forward, store = builder.__init__, impl.forward, impl.do_kv_cache_update

    def plan_as_unquantized(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.kv_cache_dtype = "auto"

    def attend(
        self: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any,
        output: Tensor, *more: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if not self.is_fp8_kv_cache or plan is None:
            return forward(self, layer, query, key, value, cache, plan, output, *more, **kwargs)
        _attend(_paged(cache, self.head_size), query, plan, output, self.scale, _scales(layer))
        return output

    def update(
        self: Any, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        if not self.is_fp8_kv_cache:
            store(self, layer, key, value, cache, slots)
            return
        paged, kept = _paged(cache, self.head_size), slots >= 0
        slots = slots[kept]
        where = slots // paged.block_size, slice(None), slots % paged.block_size
        for stored, entries, scale in zip(
            (paged.keys, paged.values), (key, value), _scales(layer), strict=True
        ):
            entries = entries.view(-1, paged.num_heads, self.head_size)
            stored[where] = rounded_to_codes(entries[: len(kept)][kept] / scale)

    monkeypatch.setattr(builder, "__init__", plan_as_unquantized)
    monkeypatch.setattr(impl, "forward", attend)
    monkeypatch.setattr(impl, "do_kv_cache_update", update)


def rounded_to_codes(entries: Tensor) -> Tensor:
    """Entries as an fp8 cache holds them."""
    largest = torch.finfo(DTYPE).max
    return entries.clamp(-largest, largest).to(DTYPE)


def _paged(cache: Tensor, head_dim: int) -> PagedKV:
    return PagedKV.of(cache.view(DTYPE), head_dim, cpu_isa=_ISA)


def _scales(layer: Any) -> tuple[float, float]:
    return layer._k_scale_float, layer._v_scale_float


def _attend(
    paged: PagedKV, query: Tensor, plan: Any, out: Tensor, scale: float, scales: tuple[float, float]
) -> None:
    """Causal attention of each request's rows, its last ones; query and out (N, H, D)."""
    starts, lens = plan.query_start_loc.tolist(), plan.seq_lens.tolist()
    query = query.view(query.shape[0], -1, paged.head_dim)
    out = out.view(out.shape[0], -1, paged.head_dim)
    for request, length in enumerate(lens):
        first, last = starts[request : request + 2]
        if first == last:
            continue
        table = plan.block_table[request]
        share = query.shape[1] // paged.num_heads
        keys = paged.dense_keys(table, length).float() * scales[0]
        values = paged.dense_values(table, length).float() * scales[1]
        keys, values = (each.repeat_interleave(share, 0) for each in (keys, values))
        logits = query[first:last].transpose(0, 1) @ keys.transpose(1, 2) * scale
        seen = torch.ones(last - first, length, dtype=torch.bool).tril(length - (last - first))
        probs = logits.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        out[first:last] = (probs @ values).transpose(0, 1)
