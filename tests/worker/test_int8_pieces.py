"""Prompts over 8-bit entries: which pieces of a context are undone, and attention over them."""

import pytest
import torch

from vllm_kvx.ops.int8.layout import scale_bytes, scales_offset
from vllm_kvx.ops.int8.store import store
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.worker.int8_cache.pieces import SLICE, Piece, plan_of, scratch_entries
from vllm_kvx.worker.int8_cache.prefill import Softmax, attend_undone, scratch_bytes

BLOCK, HEADS, KV_HEADS, DIM = 32, 4, 2, 32


def test_who_is_read_as_stored() -> None:
    """Requests with few rows, as vLLM sorts them; behind one with many all are undone."""
    plan = plan_of([0, 1, 9, 29, 29, 31], [70, 40, 20, 0, 33], BLOCK, short=8)
    assert (plan.num_requests, plan.num_rows, plan.longest) == (2, 9, 8)
    assert [(c.request, c.begin, c.stop, c.num_rows) for c in plan.chunks] == [
        (2, 9, 29, 20),
        (4, 29, 31, 2),
    ]
    assert [c.pieces for c in plan.chunks] == [(Piece(0, 20, 0),), (Piece(0, 33, 1),)]
    assert plan.bounds == ((0, 20, 0, 20), (0, 2, 0, 33))
    nobody = plan_of([0, 1, 2], [9, 9], BLOCK, short=8)
    assert not nobody.chunks and nobody.num_requests == 2


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100, 257])
@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 200, 500])
@pytest.mark.parametrize("most", [32, 96, 100])
def test_pieces_cover_a_context(rows: int, context: int, most: int) -> None:
    length = context + rows
    ((chunk,), bounds) = plan_of([0, rows], [length], BLOCK, 0, most)[3:]
    ends = [0, *(piece.end for piece in chunk.pieces)]
    assert [piece.first for piece in chunk.pieces] == ends[:-1] and ends[-1] == length
    assert all(piece.first % BLOCK == 0 for piece in chunk.pieces)
    assert chunk.pieces[-1].first <= context
    for piece in chunk.pieces:
        count = piece.end - piece.first
        assert 0 < count <= max(most, rows) + BLOCK
        assert bounds[piece.place] == (0, rows, 0, count)


def test_scratch_has_room_for_every_piece() -> None:
    for longest, rows in ((131072, 8192), (131072, 50_000), (4096, 8192)):
        entries = scratch_entries(longest, rows, BLOCK)
        for length in (longest, longest - 1, longest - 33):
            for count in {1, min(rows, length), min(8191, length)}:
                ((chunk,), _) = plan_of([0, count], [length], BLOCK, 0)[3:]
                assert max(piece.end - piece.first for piece in chunk.pieces) <= entries
    assert scratch_entries(131072, 8192, BLOCK) == SLICE + BLOCK
    # Llama-3.1-8B: keys and values of 32,800 entries, and three outputs of 8,192 rows.
    size = scratch_bytes(SLICE + BLOCK, 8192, 32, 8, 128, 2, cuts=True)
    assert size == 2 * 32800 * 8 * 128 * 2 + 3 * 8192 * 32 * (128 * 2 + 4)


@pytest.mark.parametrize("soft_cap", [0.0, 0.7])
def test_slices_are_the_whole(soft_cap: float) -> None:
    """A chunk of two requests, of which each has several pieces, or one."""
    generator = torch.Generator().manual_seed(0)
    lengths, rows = (150, 300), (40, 70)
    page = scales_offset(KV_HEADS * BLOCK * 2 * DIM) + scale_bytes(KV_HEADS, BLOCK)
    raw = torch.full((20 * page,), -1, dtype=torch.int8)
    shape, strides = (20, KV_HEADS, BLOCK, 2 * DIM), (page, BLOCK * 2 * DIM, 2 * DIM, 1)
    paged = PagedKV.of_int8(torch.as_strided(raw, shape, strides), DIM)
    table = torch.randperm(20, generator=generator)[:20].int().view(2, 10)
    for request, length in enumerate(lengths):
        index = torch.arange(length)
        slots = table[request, index // BLOCK].long() * BLOCK + index % BLOCK
        store(paged, *torch.randn(2, length, KV_HEADS, DIM, generator=generator), slots)
    starts = [0, rows[0], sum(rows)]
    query = torch.randn(sum(rows), HEADS, DIM, generator=generator)
    found = []
    for most in (10_000, 64):
        plan = plan_of(starts, list(lengths), BLOCK, 0, most)
        assert [len(chunk.pieces) for chunk in plan.chunks] == ([1, 1] if most > 64 else [3, 5])
        out = torch.full_like(query, torch.nan)
        for chunk in plan.chunks:
            softmax = Softmax(DIM**-0.5, soft_cap)
            bounds = torch.tensor(plan.bounds)
            attend_undone(query, paged, table, chunk, bounds, out, softmax, None)
        found.append(out)
    assert torch.allclose(*found, atol=1e-6)
    for request, length in enumerate(lengths):
        first, last = starts[request : request + 2]
        keys, values = (
            of(table[request], length).repeat_interleave(HEADS // KV_HEADS, 0)
            for of in (paged.dense_keys, paged.dense_values)
        )
        logits = query[first:last].transpose(0, 1) @ keys.mT * DIM**-0.5
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        seen = torch.arange(length) <= torch.arange(length - (last - first), length)[:, None]
        expected = logits.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ values
        assert torch.allclose(found[0][first:last], expected.transpose(0, 1), atol=1e-5)
