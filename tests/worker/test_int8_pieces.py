"""Prompts over 8-bit entries: which pieces of a context are undone, and attention over them."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backends import fa_utils

from vllm_kvx.ops.int8.layout import scale_bytes, scales_offset
from vllm_kvx.ops.int8.store import store
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.worker.int8_cache.pieces import (
    SHORT,
    SLICE,
    Piece,
    Plan,
    plan_of,
    scratch_entries,
    undone_together,
)
from vllm_kvx.worker.int8_cache.prefill import Softmax, attend_undone, scratch_bytes
from vllm_kvx.worker.int8_cache.room import room_of, short_rows

BLOCK, HEADS, KV_HEADS, DIM = 32, 4, 2, 32


def config_of(rows: int, longest: int, device: str) -> Any:
    """What room is counted by: steps of so many rows, requests of so many tokens."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=rows),
        model_config=SimpleNamespace(max_model_len=longest),
        cache_config=SimpleNamespace(block_size=BLOCK),
        device_config=SimpleNamespace(device_type=device),
    )


def layer_of(impl: SimpleNamespace) -> Any:
    return SimpleNamespace(impl=impl, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=DIM)


def test_who_is_read_as_stored() -> None:
    """Requests with few rows, as vLLM sorts them; behind one with many all are undone."""
    plan = plan_of([0, 1, 9, 29, 29, 31], [70, 40, 20, 0, 33], BLOCK, short=8)
    assert (plan.num_requests, plan.num_rows, plan.longest) == (2, 9, 8)
    assert [(c.request, c.num_requests, c.begin, c.stop, c.longest) for c in plan.chunks] == [
        (2, 1, 9, 29, 20),
        (4, 1, 29, 31, 2),
    ]
    assert [c.pieces for c in plan.chunks] == [(Piece(0, 20, 20, 0),), (Piece(0, 33, 33, 4),)]
    assert plan.bounds == (0, 20, 0, 20, 0, 2, 0, 33)
    nobody = plan_of([0, 1, 2], [9, 9], BLOCK, short=8)
    assert not nobody.chunks and nobody.num_requests == 2


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100, 257])
@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 200, 500])
@pytest.mark.parametrize("most", [32, 96, 100])
def test_pieces_cover_a_context(rows: int, context: int, most: int) -> None:
    length = context + rows
    ((chunk,), bounds) = plan_of([0, rows], [length], BLOCK, 0, most)[3:]
    ends = [0, *(piece.first + piece.total for piece in chunk.pieces)]
    assert [piece.first for piece in chunk.pieces] == ends[:-1] and ends[-1] == length
    assert all(piece.first % BLOCK == 0 for piece in chunk.pieces)
    assert chunk.pieces[-1].first <= context
    for piece in chunk.pieces:
        assert 0 < piece.total == piece.longest <= max(most, rows) + BLOCK
        assert bounds[piece.place :][:4] == (0, rows, 0, piece.total)
    assert len(bounds) == 4 * len(chunk.pieces)


def test_who_shares_a_piece() -> None:
    """Neighbours with short contexts; not across who has no rows, nor with a long context."""
    starts = [0, 1, 31, 51, 71, 71, 91, 111, 311, 331, 361]
    lens = [70, 30, 60, 20, 9, 20, 33, 300, 20, 80]
    plan = plan_of(starts, lens, BLOCK, 1, most=96, together=112)
    assert [(c.request, c.num_requests, c.begin, c.stop, c.longest) for c in plan.chunks] == [
        (1, 3, 1, 71, 30),
        (5, 2, 71, 111, 20),
        (7, 1, 111, 311, 200),
        (8, 2, 311, 361, 30),
    ]
    together = [chunk for chunk in plan.chunks if chunk.num_requests > 1]
    assert [(*c.pieces[0][:3],) for c in together] == [(0, 110, 60), (0, 53, 33), (0, 100, 80)]
    assert all(len(chunk.pieces) == 1 for chunk in together)
    of_rows, of_entries = plan.chunks[0].bounds_at(plan.chunks[0].pieces[0])
    assert plan.bounds[of_rows] == (0, 30, 50, 70)
    assert plan.bounds[of_entries] == (0, 30, 90, 110)
    # One that fits alone, and is in two pieces unless others share one with it.
    for most, together_in, pieces in ((96, 96, [2, 1]), (96, 128, [1])):
        found = plan_of([0, 20, 40], [100, 20], BLOCK, 0, most, together_in).chunks
        assert [len(chunk.pieces) for chunk in found] == pieces


def test_scratch_has_room_for_every_piece() -> None:
    for longest, rows in ((131072, 8192), (131072, 50_000), (4096, 8192)):
        entries = scratch_entries(longest, rows, BLOCK)
        for length in (longest, longest - 1, longest - 33):
            for count in {1, min(rows, length), min(8191, length)}:
                ((chunk,), _) = plan_of([0, count], [length], BLOCK, 0)[3:]
                assert max(piece.total for piece in chunk.pieces) <= entries
        # All prompts of a step, where none was there before.
        assert min(rows, SLICE) <= undone_together(longest, rows) <= entries
    assert scratch_entries(131072, 8192, BLOCK) == SLICE + BLOCK
    assert scratch_entries(4096, 8192, BLOCK) == undone_together(4096, 8192) == 8192
    # Llama-3.1-8B: keys and values of 32,800 entries, and three outputs of 8,192 rows.
    size = scratch_bytes(SLICE + BLOCK, 8192, 32, 8, 128, 2, cuts=True)
    assert size == 2 * 32800 * 8 * 128 * 2 + 3 * 8192 * 32 * (128 * 2 + 4)


@pytest.mark.parametrize(
    ("longest", "rows"),
    [(SLICE, 8192), (SLICE + 1, 8192), (SLICE + BLOCK, 8192), (40_960, 65_536), (131_072, 8192)],
)
def test_outputs_of_several_pieces_are_counted(longest: int, rows: int) -> None:
    """Steps that hold whole contexts have requests with few rows and long contexts, too."""
    asked = min(rows, longest) // 2
    ((chunk,), _) = plan_of([0, asked], [longest], BLOCK, 0)[3:]
    assert (len(chunk.pieces) > 1) == (longest > SLICE)
    most = max(piece.total for piece in chunk.pieces)
    taken = scratch_bytes(most, asked, HEADS, KV_HEADS, DIM, 2, cuts=len(chunk.pieces) > 1)
    config = config_of(rows, longest, "cuda")
    assert taken <= room_of([layer_of(SimpleNamespace(sidecar_bytes=0))], torch.bfloat16, config)


@pytest.mark.parametrize(
    ("device", "dtype", "short"),
    [
        ("cuda", torch.bfloat16, SHORT),
        ("cuda", torch.float16, SHORT),
        ("cuda", torch.float32, 96),
        ("cpu", torch.float32, 0),
    ],
    ids=str,
)
def test_room_is_counted_where_entries_are_undone(
    device: str, dtype: torch.dtype, short: int
) -> None:
    """Models in float32 have prompts read as they are stored, on GPUs."""
    assert short_rows(device, dtype, 96) == short
    config = config_of(96, 512, device)
    layers = [layer_of(SimpleNamespace()), layer_of(SimpleNamespace(sidecar_bytes=0))]
    assert room_of(layers[:1], dtype, config) == 0
    size = 0 if short == 96 else 2 * 512 * KV_HEADS * DIM * dtype.itemsize
    assert room_of(layers, dtype, config) == size


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    softcap: float,
    return_softmax_lse: bool,
    fa_version: int,
) -> tuple[Tensor, Tensor]:
    """What FlashAttention returns; it reads no row and no entry outside of the bounds."""
    assert return_softmax_lse and fa_version == 3 and out.shape == q.shape
    of_rows, of_entries = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert of_rows[0] == of_entries[0] == 0 and len(of_rows) == len(of_entries)
    assert of_rows[-1] == len(q) and of_entries[-1] == len(k) == len(v)
    assert max_seqlen_q == max(b - a for a, b in pairwise(of_rows))
    assert max_seqlen_k == max(b - a for a, b in pairwise(of_entries))
    lse = torch.full((q.shape[1], len(q)), torch.nan)
    for (a, b), (c, d) in zip(pairwise(of_rows), pairwise(of_entries), strict=True):
        for row in range(a, b):
            seen = slice(c, d - (b - 1 - row) if causal else d)
            keys, values = (
                of[seen].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for of in (k, v)
            )
            logits = torch.einsum("hd,nhd->hn", q[row], keys) * softmax_scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            lse[:, row] = logits.logsumexp(dim=-1)
            out[row] = torch.einsum("hn,nhd->hd", logits.softmax(dim=-1), values)
    return out, lse


class Batch:
    """Requests over pages, whose numbers of entries and of rows are `lengths` and `rows`."""

    def __init__(self, lengths: tuple[int, ...], rows: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        count, blocks = len(lengths), max(lengths) // BLOCK + 1
        page = scales_offset(KV_HEADS * BLOCK * 2 * DIM) + scale_bytes(KV_HEADS, BLOCK)
        raw = torch.full((count * blocks * page,), -1, dtype=torch.int8)
        shape, strides = (count * blocks, KV_HEADS, BLOCK, 2 * DIM), (page, BLOCK * 2 * DIM)
        self.lengths = list(lengths)
        self.paged = PagedKV.of_int8(torch.as_strided(raw, shape, (*strides, 2 * DIM, 1)), DIM)
        self.table = torch.randperm(count * blocks, generator=generator).int().view(count, blocks)
        for request, length in enumerate(lengths):
            index = torch.arange(length)
            slots = self.table[request, index // BLOCK].long() * BLOCK + index % BLOCK
            entries = torch.randn(2, length, KV_HEADS, DIM, generator=generator)
            store(self.paged, *entries, slots)
        self.starts = torch.tensor([0, *rows]).cumsum(0).tolist()
        self.query = torch.randn(sum(rows), HEADS, DIM, generator=generator)

    def attended(self, plan: Plan, soft_cap: float, version: int | None) -> Tensor:
        """(rows, H, D): what attention to undone entries writes."""
        out, bounds = torch.full_like(self.query, torch.nan), torch.tensor(plan.bounds)
        softmax = Softmax(DIM**-0.5, soft_cap)
        for chunk in plan.chunks:
            where = self.query, self.paged, self.table, chunk, bounds, out
            attend_undone(*where, softmax, version)
        return out

    def expected(self, soft_cap: float) -> Tensor:
        """The same by masked softmaxes."""
        found = []
        for request, (first, last) in enumerate(pairwise(self.starts)):
            length = self.lengths[request]
            keys, values = (
                of(self.table[request], length).repeat_interleave(HEADS // KV_HEADS, 0)
                for of in (self.paged.dense_keys, self.paged.dense_values)
            )
            logits = self.query[first:last].transpose(0, 1) @ keys.mT * DIM**-0.5
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            rows = torch.arange(length - (last - first), length)
            logits = logits.masked_fill(torch.arange(length) > rows[:, None], float("-inf"))
            found.append((logits.softmax(dim=-1) @ values).transpose(0, 1))
        return torch.cat(found)


@pytest.mark.parametrize("version", [None, 3])
@pytest.mark.parametrize("soft_cap", [0.0, 0.7])
def test_slices_are_the_whole(
    soft_cap: float, version: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests of several pieces each, of one each, and in one piece."""
    stand_in: Any = flash_attn_varlen_func
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", stand_in, raising=False)
    batch = Batch((150, 300), (40, 70))
    found = []
    for most, together, pieces in ((10_000, None, [1]), (10_000, 1, [1, 1]), (64, None, [3, 5])):
        plan = plan_of(batch.starts, batch.lengths, BLOCK, 0, most, together)
        assert [len(chunk.pieces) for chunk in plan.chunks] == pieces
        found.append(batch.attended(plan, soft_cap, version))
    expected = batch.expected(soft_cap)
    assert all(torch.allclose(each, expected, atol=1e-5) for each in found)


@pytest.mark.parametrize("version", [None, 3])
@pytest.mark.parametrize("together", [1, 40, 100, 128, 161, 10_000])
def test_prompts_beside_each_other(
    together: int, version: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one row and more, with and without a context, that end at blocks' ends or not."""
    stand_in: Any = flash_attn_varlen_func
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", stand_in, raising=False)
    batch = Batch((33, 7, 64, 97, 1, 250, 32), (1, 7, 20, 1, 1, 33, 32))
    plan = plan_of(batch.starts, batch.lengths, BLOCK, 0, 128, together)
    shared = [chunk.num_requests for chunk in plan.chunks]
    by_room = {
        1: [1] * 7,
        40: [2, 1, 1, 1, 1, 1],
        100: [2, 1, 2, 1, 1],
        128: [3, 2, 1, 1],
        161: [3, 2, 1, 1],
        10_000: [7],
    }
    assert shared == by_room[together]
    assert torch.allclose(batch.attended(plan, 0.0, version), batch.expected(0.0), atol=1e-5)
