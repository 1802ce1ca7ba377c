"""Attention of rows at any positions: plain torch against a mask, the kernel against that."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support import inside
from support.ragged import LAYOUTS, make_batch, make_sinks
from torch import Tensor

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.chosen_rows import (
    ChosenRows,
    attend_chosen_kernel,
    attend_chosen_reference,
)

LENGTHS = [1, 70, 33, 200]


def make_rows(lengths: list[int], share: float, **shape: Any) -> tuple[Any, ChosenRows, Tensor]:
    """A cache of prompts, chosen rows of each with its last one, and their queries."""
    batch = make_batch(0, lengths, [1] * len(lengths), **shape)
    generator = torch.Generator().manual_seed(1)
    chosen = []
    for length in lengths:
        count = max(int(length * share), 1)
        order = torch.randperm(length - 1, generator=generator)[: count - 1]
        chosen.append(torch.cat([order.sort().values, torch.tensor([length - 1])]))
    counts = np.array([len(each) for each in chosen], dtype=np.int32)
    device = shape["device"]
    at = torch.cat(chosen).to(device)
    rows = ChosenRows(np.arange(len(lengths)), counts, at, batch.block_tables)
    query = torch.randn(len(at), shape["heads"], shape["head_dim"], generator=generator)
    return batch.paged, rows, query.to(device, shape.get("dtype", torch.float32))


def masked(
    paged: Any,
    rows: ChosenRows,
    query: Tensor,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """By one softmax a row over the keys at or before it, a sink's share of which goes nowhere."""
    out, first = torch.empty_like(query), 0
    group = query.shape[1] // paged.num_heads
    for count, table in zip(rows.counts.tolist(), rows.block_tables, strict=True):
        for row in range(first, first + count):
            n = int(rows.positions[row]) + 1
            keys, values = paged.dense_keys(table, n), paged.dense_values(table, n)
            for head in range(query.shape[1]):
                scores = keys[head // group].float() @ query[row, head].float() * scale
                if soft_cap is not None:
                    scores = (scores / soft_cap).tanh() * soft_cap
                weights = scores.softmax(0)
                if sinks is not None:
                    weights *= torch.sigmoid(scores.logsumexp(0) - sinks[head].float())
                out[row, head] = weights @ values[head // group].float()
        first += count
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_sees_what_is_at_or_before_a_row(layout: str, device: str) -> None:
    shape: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=32, device=device, layout=layout)
    paged, rows, query = make_rows(LENGTHS, 0.4, **shape)
    ours = torch.empty_like(query)
    attend_chosen_reference(query, paged, rows, ours, 0.3)
    torch.testing.assert_close(ours, masked(paged, rows, query, 0.3), rtol=1e-5, atol=1e-6)


LOGITS: list[tuple[float | None, torch.dtype | None]] = [
    (None, torch.float32),
    (1.5, None),
    (1.5, torch.bfloat16),
]


@pytest.mark.parametrize(("soft_cap", "sink_dtype"), LOGITS, ids=str)
def test_soft_caps_and_sinks(
    soft_cap: float | None, sink_dtype: torch.dtype | None, device: str
) -> None:
    shape: dict[str, Any] = dict(heads=6, kv_heads=2, head_dim=32, device=device)
    paged, rows, query = make_rows([1, 70, 200], 0.3, **shape)
    sinks = None if sink_dtype is None else make_sinks(6, device, sink_dtype)
    scales = (0.3, 1.5, 0.5)
    expected = masked(paged, rows, query, 0.3 * 1.5, soft_cap, sinks) * 0.5
    for attend in (attend_chosen_reference, attend_chosen_kernel):
        ours = torch.full_like(query, math.nan)
        attend(query, paged, rows, ours, *scales, soft_cap, sinks)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("soft_cap", "sink_dtype"), [*LOGITS, (None, None)], ids=str)
def test_soft_caps_and_sinks_are_those_of_vllm(
    soft_cap: float | None, sink_dtype: torch.dtype | None
) -> None:
    """vLLM's own CPU attention over its own cache: what is scaled, what is capped, and what not."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        pytest.skip("needs vLLM's CPU build")
    heads, kv_heads, dim, length, block_size, scale = 6, 2, 64, 90, 32, 0.3
    torch.manual_seed(0)
    cache = torch.zeros(3, kv_heads, block_size, 2 * dim)
    key_cache, value_cache = cache.view(3, kv_heads, 2 * block_size, -1).chunk(2, dim=2)
    keys, values = torch.randn(2, length, kv_heads, dim)
    slots, table = torch.arange(length), torch.arange(3, dtype=torch.int32)[None]
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, "vec")
    query, starts = torch.randn(length, heads, dim), torch.tensor([0, length], dtype=torch.int32)
    lens = torch.tensor([length], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        1, heads, kv_heads, dim, lens, torch.float32, starts, True, -1, "vec", False
    )
    sinks = None if sink_dtype is None else make_sinks(heads, "cpu", sink_dtype)
    theirs, ours = torch.empty_like(query), torch.empty_like(query)
    where = (query, key_cache, value_cache, theirs, starts, lens, scale, True, None, -1, table)
    ops.cpu_attention_with_kv_cache(*where, soft_cap or 0.0, plan, sinks)
    paged = PagedKV.of(cache, dim, cpu_isa="vec")
    rows = ChosenRows(np.array([0]), np.array([length], dtype=np.int32), slots, table)
    attend_chosen_reference(query, paged, rows, ours, scale, soft_cap=soft_cap, sinks=sinks)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_reference_in_slices(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    paged, rows, query = make_rows(LENGTHS, 0.4, heads=4, kv_heads=2, head_dim=32, device=device)
    whole, parts = torch.empty_like(query), torch.empty_like(query)
    attend_chosen_reference(query, paged, rows, whole, 0.3)
    inside.slice_chosen_rows(monkeypatch, scores=4 * 200 * 7)
    attend_chosen_reference(query, paged, rows, parts, 0.3)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        (dict(heads=4, kv_heads=2, head_dim=32), LENGTHS),
        (dict(heads=3, kv_heads=3, head_dim=64, block_size=32), [40, 65]),
        (dict(heads=8, kv_heads=1, head_dim=128, layout="nhd"), [100]),
        (dict(heads=2, kv_heads=2, head_dim=24, block_size=8), [17, 90]),
        (dict(heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16), [150, 1, 260]),
    ],
)
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_kernel(shape: dict[str, Any], lengths: list[int], share: float, device: str) -> None:
    paged, rows, query = make_rows(lengths, share, device=device, **shape)
    scale = 1 / math.sqrt(shape["head_dim"])
    ours, expected = torch.full_like(query, math.nan), torch.empty_like(query)
    attend_chosen_kernel(query, paged, rows, ours, scale)
    attend_chosen_reference(query, paged, rows, expected, scale)
    is_half = query.dtype == torch.bfloat16
    torch.testing.assert_close(
        ours, expected, rtol=2e-2 if is_half else 1e-5, atol=1e-2 if is_half else 1e-5
    )


def test_kernel_reads_an_fp8_cache(device: str) -> None:
    shape: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=32, device=device)
    paged, rows, query = make_rows([90, 40], 0.5, cache_dtype=torch.float8_e4m3fn, **shape)
    ours, expected = torch.empty_like(query), torch.empty_like(query)
    attend_chosen_kernel(query, paged, rows, ours, 0.2, 1.5, 0.5)
    attend_chosen_reference(query, paged, rows, expected, 0.2, 1.5, 0.5)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
