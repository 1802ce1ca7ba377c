"""Kept entries moved to the first slots of their request's blocks: keys and values."""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.ops.paged import PagedKV

# An interpreted program costs the same whatever its size.
_MOVE_BLOCK = {"cuda": 16, "cpu": 512}
_COPY_BYTES = 64 << 20
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def move_entries(
    paged: PagedKV,
    block_tables: Tensor,
    sources: Tensor,
    targets: Tensor,
    num_moves: Tensor,
    out_offsets: Tensor,
    max_moves: int,
    target_tables: Tensor | None = None,
) -> None:
    """Copies keys and values of each KV head from source to target entries, bit for bit.

    Args:
        paged: the layer's cache, of any 1, 2 or 4 byte dtype; changed in place.
        block_tables: (F, max_blocks) int32, unit stride along a row.
        sources, targets: (G, total) int32, from `select_moves`: entry indices within the request,
            no entry in both.
        num_moves: (G, F) int32, contiguous.
        out_offsets: (F + 1,) int64, first column of each request.
        max_moves: at least the largest of `num_moves`.
        target_tables: as `block_tables`, where target entries are in other blocks.
    """
    if target_tables is None:
        target_tables = block_tables
    if not (max_moves and num_moves.numel()):
        return
    raw = _RAW[paged.keys.element_size()]
    keys, values = paged.keys.view(raw), paged.values.view(raw)
    block = _MOVE_BLOCK[keys.device.type]
    _move_kernel[(triton.cdiv(max_moves, block), *num_moves.shape)](
        keys,
        *keys.stride(),
        values,
        *values.stride(),
        block_tables,
        block_tables.stride(0),
        target_tables,
        target_tables.stride(0),
        sources,
        targets,
        sources.stride(0),
        num_moves,
        out_offsets,
        HEAD_DIM=paged.head_dim,
        PADDED_DIM=triton.next_power_of_2(paged.head_dim),
        BLOCK_SIZE=paged.block_size,
        BLOCK=block,
    )


@triton.jit(
    do_not_specialize=[
        "block_tables",
        "table_stride",
        "target_tables",
        "target_table_stride",
        "sources",
        "targets",
        "moves_stride",
        "num_moves",
        "out_offsets",
    ],
)
def _move_kernel(
    keys,
    key_block_stride,
    key_head_stride,
    key_entry_stride,
    key_channel_stride,
    values,
    value_block_stride,
    value_head_stride,
    value_entry_stride,
    value_channel_stride,
    block_tables,
    table_stride,
    target_tables,
    target_table_stride,
    sources,
    targets,
    moves_stride,
    num_moves,
    out_offsets,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2)
    count = tl.load(num_moves + head * tl.num_programs(2) + request)
    first = tl.program_id(0) * BLOCK
    if first >= count:
        return
    move = first + tl.arange(0, BLOCK)
    exists = move < count
    column = head * moves_stride + tl.load(out_offsets + request) + move
    source = tl.load(sources + column, mask=exists, other=0)
    target = tl.load(targets + column, mask=exists, other=0)
    table = block_tables + request.to(tl.int64) * table_stride
    source_block = tl.load(table + source // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    table = target_tables + request.to(tl.int64) * target_table_stride
    target_block = tl.load(table + target // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    source = (source % BLOCK_SIZE)[:, None]
    target = (target % BLOCK_SIZE)[:, None]
    source_block = source_block[:, None]
    target_block = target_block[:, None]
    channel = tl.arange(0, PADDED_DIM)[None, :]
    mask = exists[:, None]
    if HEAD_DIM != PADDED_DIM:
        mask = mask & (channel < HEAD_DIM)

    keys += head * key_head_stride + channel * key_channel_stride
    values += head * value_head_stride + channel * value_channel_stride
    key = tl.load(keys + source_block * key_block_stride + source * key_entry_stride, mask=mask)
    value = tl.load(
        values + source_block * value_block_stride + source * value_entry_stride, mask=mask
    )
    tl.store(keys + target_block * key_block_stride + target * key_entry_stride, key, mask=mask)
    tl.store(
        values + target_block * value_block_stride + target * value_entry_stride, value, mask=mask
    )


def move_entries_reference(
    paged: PagedKV,
    block_tables: Tensor,
    moves: list[list[tuple[Tensor, Tensor]]],
    target_tables: Tensor | None = None,
) -> None:
    """`move_entries` in plain torch, for the moves of `select_moves_reference`; in place."""
    target_tables = block_tables if target_tables is None else target_tables
    for table, to, heads in zip(block_tables, target_tables, moves, strict=True):
        for head, (sources, targets) in enumerate(heads):
            for cache in (paged.keys, paged.values):
                raw = cache.view(_RAW[cache.element_size()])
                source = (table[sources // paged.block_size].long(), sources % paged.block_size)
                target = (to[targets // paged.block_size].long(), targets % paged.block_size)
                raw[target[0], head, target[1]] = raw[source[0], head, source[1]]


def copy_blocks(paged: PagedKV, sources: Tensor, targets: Tensor) -> None:
    """Copies keys and values of whole blocks, bit for bit; in place.

    sources, targets: (n,) int64 block ids, none in both.
    """
    for cache in (paged.keys, paged.values):
        raw = cache.view(_RAW[cache.element_size()])
        # The copy takes memory for a moment.
        step = max(_COPY_BYTES // (raw[0].numel() * raw.element_size()), 1)
        for some, there in zip(sources.split(step), targets.split(step), strict=True):
            raw.index_copy_(0, there, raw.index_select(0, some))
