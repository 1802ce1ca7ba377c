"""Retention kernels compiled, at the lengths they are for. Skipped without a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import inside
from support.ragged import Batch, make_batch, make_sinks, offsets_of, poisoned_outputs
from torch import Tensor

from vllm_kvx.ops import radix
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.key_norms import key_scores, key_scores_reference
from vllm_kvx.ops.prompt.move import move_entries, move_entries_reference
from vllm_kvx.ops.prompt.pool import pool_per_kv_head, pool_per_kv_head_reference
from vllm_kvx.ops.prompt.saliency import window_saliency, window_saliency_reference
from vllm_kvx.ops.prompt.select import (
    select_kept,
    select_kept_reference,
    select_moves,
    select_moves_reference,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LLAMA: dict[str, Any] = dict(heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
LENGTHS = [131_072, 5000, 17]
WINDOW = 8


@pytest.fixture
def no_waiting() -> Iterator[Callable[[bool], None]]:
    """Lets the test forbid anything that waits for the device."""
    yield lambda forbidden: torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
    torch.cuda.set_sync_debug_mode("default")


def scores_of(batch: Batch, scale: float, key_scale: float = 1.0, **logits: Any) -> Tensor:
    max_num_keys, total_keys = batch.max_num_keys, batch.total_keys
    return window_saliency(
        batch.queries,
        batch.paged,
        batch.block_tables,
        batch.num_keys,
        batch.windows,
        batch.offsets,
        max_num_keys,
        total_keys,
        scale,
        key_scale,
        **logits,
    )


def expected_of(batch: Batch, scale: float, key_scale: float = 1.0, **logits: Any) -> Tensor:
    tables = batch.block_tables
    sizes = (batch.num_keys, batch.windows, batch.offsets)
    scales = (scale, key_scale)
    return window_saliency_reference(batch.queries, batch.paged, tables, *sizes, *scales, **logits)


@pytest.mark.parametrize("soft_cap", [None, 1.0, 50.0])
def test_soft_caps_and_sinks_of_long_prompts(soft_cap: float | None) -> None:
    batch = make_batch(1, LENGTHS, [WINDOW] * len(LENGTHS), device="cuda", layout="nhd", **LLAMA)
    logits = {"soft_cap": soft_cap, "sinks": make_sinks(32, "cuda", torch.bfloat16)}
    with poisoned_outputs():
        scores = scores_of(batch, 128**-0.5, **logits)
    torch.testing.assert_close(
        scores, expected_of(batch, 128**-0.5, **logits), rtol=1e-4, atol=1e-9
    )


@pytest.mark.parametrize(
    ("layout", "cache_dtype", "key_scale"),
    [("nhd", None, 1.0), ("hnd", None, 1.0), ("nhd", torch.float8_e4m3fn, 0.5)],
    ids=["nhd", "hnd", "fp8"],
)
def test_long_batch(layout: str, cache_dtype: torch.dtype | None, key_scale: float) -> None:
    windows = [WINDOW] * len(LENGTHS)
    batch = make_batch(
        0, LENGTHS, windows, device="cuda", layout=layout, cache_dtype=cache_dtype, **LLAMA
    )
    with poisoned_outputs():
        scores = scores_of(batch, 128**-0.5, key_scale)
    expected = expected_of(batch, 128**-0.5, key_scale)
    # Both are sums of exact products in float32, in another order.
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-9)

    kernels = torch.tensor([7, 13, 5], dtype=torch.int32, device="cuda")
    sizes = (batch.num_keys, batch.windows, batch.offsets)
    with poisoned_outputs():
        unpooled = torch.empty_like(scores[:8])
        pooled = pool_per_kv_head(scores, 8, *sizes, kernels, batch.max_num_keys, unpooled)
    expected = pool_per_kv_head_reference(scores, 8, *sizes, kernels)
    assert torch.equal(pooled, expected)
    expected = pool_per_kv_head_reference(scores, 8, *sizes, torch.ones_like(kernels))
    assert torch.equal(unpooled, expected)

    caps = torch.tensor([13_107, 500, 8], dtype=torch.int32, device="cuda")
    check_selection(batch, pooled, caps, unpooled)


def check_selection(
    batch: Batch, scores: Tensor, caps: Tensor, unpooled: Tensor | None = None
) -> None:
    """Kept keys, moves and the moved cache, all exactly as in the references."""
    sizes = (batch.num_keys, batch.windows, caps, batch.offsets)
    out_offsets = offsets_of(torch.minimum(batch.num_keys, caps))
    total = int(out_offsets[-1])
    with poisoned_outputs():
        kept = select_kept(scores, *sizes, out_offsets, total, unpooled=unpooled)
        sources, targets, num_moves = select_moves(
            scores, *sizes, out_offsets, total, unpooled=unpooled
        )
    expected_kept = select_kept_reference(scores, *sizes, unpooled)
    assert torch.equal(kept.long(), torch.cat(expected_kept, dim=1))
    moves = select_moves_reference(scores, *sizes, unpooled)
    for f, rows in enumerate(moves):
        first = int(out_offsets[f])
        for r, (source, target) in enumerate(rows):
            columns = slice(first, first + len(source))
            assert int(num_moves[r, f]) == len(source)
            assert torch.equal(sources[r, columns].long(), source)
            assert torch.equal(targets[r, columns].long(), target)

    expected = PagedKV(batch.paged.keys.clone(), batch.paged.values.clone())
    move_entries_reference(expected, batch.block_tables, moves)
    tables, max_moves = batch.block_tables, int(caps.max())
    move_entries(batch.paged, tables, sources, targets, num_moves, out_offsets, max_moves)
    raw = torch.uint8 if expected.keys.element_size() == 1 else torch.int16
    for ours, theirs in (
        (batch.paged.keys, expected.keys),
        (batch.paged.values, expected.values),
    ):
        assert torch.equal(ours.contiguous().view(raw), theirs.contiguous().view(raw))


@pytest.mark.parametrize("head_dim", [128, 80])
@pytest.mark.parametrize(
    ("layout", "cache_dtype"),
    [("nhd", torch.bfloat16), ("hnd", torch.float32), ("nhd", torch.float8_e4m3fn)],
    ids=["nhd", "hnd", "fp8"],
)
def test_key_norms(layout: str, cache_dtype: torch.dtype, head_dim: int) -> None:
    shape = LLAMA | dict(head_dim=head_dim, layout=layout, cache_dtype=cache_dtype)
    lengths = [*LENGTHS, 0]
    batch = make_batch(5, lengths, [WINDOW] * 3 + [0], device="cuda", **shape)
    sizes = (batch.block_tables, batch.num_keys, batch.offsets)
    with poisoned_outputs():
        scores = key_scores(batch.paged, *sizes, batch.max_num_keys, batch.total_keys + 3)
    assert scores[:, batch.total_keys :].isnan().all(), "wrote past the batch"
    scores = scores[:, : batch.total_keys]
    # The norms' squares are added in another order: an ulp of the norm is one of the score.
    expected = key_scores_reference(batch.paged, *sizes)
    ulps = scores.view(torch.int32) - expected.view(torch.int32)
    assert ulps.abs().max() <= 16
    caps = torch.tensor([13_107, 500, 8, 0], dtype=torch.int32, device="cuda")
    check_selection(batch, scores, caps)


@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_long_plateaus(levels: int) -> None:
    batch = make_batch(1, LENGTHS, [WINDOW, 1, 16], device="cuda", **LLAMA)
    rng = torch.Generator("cuda").manual_seed(levels)
    scores = torch.rand(8, batch.total_keys, generator=rng, device="cuda")
    caps = torch.tensor([131_071, 50, 17], dtype=torch.int32, device="cuda")
    check_selection(batch, (scores * levels).floor() / levels, caps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "window"),
    [(32, 2, 2, 1), (96, 7, 1, 8), (64, 16, 2, 64), (256, 4, 1, 8), (128, 4, 2, 70)],
)
def test_shapes(head_dim: int, heads: int, kv_heads: int, window: int, dtype: torch.dtype) -> None:
    shape = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    lengths, windows = [3001, window], [window, window]
    batch = make_batch(2, lengths, windows, device="cuda", block_size=32, **shape)
    scale = head_dim**-0.5
    expected = expected_of(batch, scale)
    torch.testing.assert_close(scores_of(batch, scale), expected, rtol=1e-4, atol=1e-8)


def test_batched_is_alone_bit_for_bit() -> None:
    batch = make_batch(3, LENGTHS, [WINDOW] * 3, device="cuda", **LLAMA)
    together = scores_of(batch, 0.1)
    for f in range(len(LENGTHS)):
        first, last = batch.offsets[f : f + 2].tolist()
        assert torch.equal(together[:, first:last], scores_of(batch.alone(f), 0.1))


def test_nothing_waits_and_nothing_compiles_twice(no_waiting: Callable[[bool], None]) -> None:
    """All operators of a step, for batches of every size, after a batch of each kind."""
    kernels = inside.retention_kernels()
    compiled = []
    usual, shared = contextlib.nullcontext, radix.always_shared
    for lengths, mode in (
        ([4096], shared),
        ([4096], usual),
        ([1000, 17, 33], usual),
        ([16] * 16, usual),
        ([131_072], usual),
    ):
        batch = make_batch(4, lengths, [WINDOW] * len(lengths), device="cuda", **LLAMA)
        caps = torch.maximum(batch.num_keys // 10, batch.windows)
        out_offsets = offsets_of(torch.minimum(batch.num_keys, caps))
        total, max_moves, max_num_keys = int(out_offsets[-1]), int(caps.max()), max(lengths)
        widths = torch.full_like(batch.num_keys, 7)
        sizes = (batch.num_keys, batch.windows)
        # A view of a larger buffer, whose start is aligned to nothing.
        tables = torch.cat([batch.block_tables[:, :1], batch.block_tables], dim=1)[:, 1:]
        no_waiting(len(compiled) > 1)
        key_scores(batch.paged, tables, sizes[0], batch.offsets, max_num_keys, sum(lengths))
        scores = window_saliency(
            batch.queries, batch.paged, tables, *sizes, batch.offsets,
            max_num_keys, sum(lengths), 0.1,
        )  # fmt: skip
        unpooled = torch.empty_like(scores[:8])
        scores = pool_per_kv_head(scores, 8, *sizes, batch.offsets, widths, max_num_keys, unpooled)
        with mode():
            moves = select_moves(
                scores, *sizes, caps, batch.offsets, out_offsets, total, unpooled=unpooled
            )
        move_entries(batch.paged, tables, *moves, out_offsets, max_moves)
        no_waiting(False)
        torch.cuda.synchronize()
        device = torch.cuda.current_device()
        compiled.append([len(kernel.device_caches[device][0]) for kernel in kernels])
    assert all(counts == compiled[1] for counts in compiled[1:]), compiled
