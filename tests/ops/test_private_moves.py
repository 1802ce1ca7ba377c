"""What retention keeps, moved to new blocks: the old ones stay as they are."""

from typing import Any

import pytest
import torch
from support import inside
from support.ragged import LAYOUTS, make_batch, same_bits
from torch import Tensor

from vllm_kvx.ops.prompt.move import copy_blocks, move_entries, move_entries_reference

KEPT = (5, 40, 33)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slice_bytes", [1, 1 << 20])
def test_entries_move_out(
    layout: str, slice_bytes: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Of three prompts: all to new blocks, one block of several, and none."""
    inside.copy_blocks_of(monkeypatch, bytes_at_a_time=slice_bytes)
    shape: dict[str, Any] = dict(heads=2, kv_heads=2, head_dim=32, block_size=32)
    batch = make_batch(0, [50, 90, 70], [1, 1, 1], device=device, layout=layout, **shape)
    paged, tables = batch.paged, batch.block_tables
    size = paged.block_size
    before = [cache.clone() for cache in (paged.keys, paged.values)]
    used = set(tables.flatten().tolist())
    fresh = iter([block for block in range(paged.keys.shape[0]) if block not in used])
    places = [list(range(-(-KEPT[0] // size))), [1 if KEPT[1] > size else 0], []]
    targets = tables.clone()
    for row, columns in enumerate(places):
        for column in columns:
            targets[row, column] = next(fresh)
    pairs = [(row, column) for row, columns in enumerate(places) for column in columns]
    rows, columns = torch.tensor(pairs, device=device).unbind(1)
    sources = tables[rows, columns].long()
    copy_blocks(paged, sources, targets[rows, columns].long())

    generator = torch.Generator().manual_seed(0)
    moves: list[list[tuple[Tensor, Tensor]]] = []
    for length, kept in zip((50, 90, 70), KEPT, strict=True):
        heads = []
        for _ in range(paged.num_heads):
            order = torch.randperm(length, generator=generator)[:kept].sort().values
            stay = set(order[order < kept].tolist())
            holes = [slot for slot in range(kept) if slot not in stay]
            heads.append((order[order >= kept], torch.tensor(holes, dtype=torch.int64)))
        moves.append(heads)
    total = sum(KEPT)
    packed = torch.zeros(2, paged.num_heads, total, dtype=torch.int32)
    counts = torch.zeros(paged.num_heads, 3, dtype=torch.int32)
    offsets = torch.tensor([0, *torch.tensor(KEPT).cumsum(0).tolist()])
    for f, heads in enumerate(moves):
        for head, (source, target) in enumerate(heads):
            span = slice(int(offsets[f]), int(offsets[f]) + len(source))
            packed[0, head, span], packed[1, head, span] = source.int(), target.int()
            counts[head, f] = len(source)
    expected = [cache.clone() for cache in (paged.keys, paged.values)]
    copy = type(paged)(*expected)
    move_entries_reference(copy, tables, moves, targets)
    move_entries(
        paged,
        tables,
        packed[0].to(device),
        packed[1].to(device),
        counts.to(device),
        offsets.to(device),
        max(KEPT),
        targets,
    )
    assert same_bits(paged.keys, copy.keys) and same_bits(paged.values, copy.values)
    left = sources.tolist()
    for cache, old in zip((paged.keys, paged.values), before, strict=True):
        assert same_bits(cache[left], old[left]), "blocks that were left are as they were"
    # What a request sees now: entries that stayed in their slots, and those that moved.
    for f, heads in enumerate(moves):
        for head, (source, target) in enumerate(heads):
            slots = torch.arange(KEPT[f])
            entries = slots.clone()
            entries[target] = source
            old = before[0][tables[f].cpu()[entries // size].long(), head, entries % size]
            new = paged.keys[targets[f].cpu()[slots // size].long(), head, slots % size]
            assert torch.equal(new, old)
