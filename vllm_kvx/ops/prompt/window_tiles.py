"""Tiles of scores between a window's queries and the paged keys of their prompt.

Saliency and attention metrics are made from them, in two passes over the keys: the first finds each
softmax row's maximum and sum, the second the probabilities. The first and all that both need to be
launched is here; the second is what the two differ in (`saliency`, `attention_metrics`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.ops.softmax import LOG2_E, capped, factors

# Query rows that one program multiplies with a tile of keys.
_MAX_ROWS = 64
# Keys per tile at most, and their bytes. float32 is multiplied without matrix instructions, from
# registers. An interpreted program costs the same whatever its size.
_BLOCK_KEYS = {"cuda": 128, "cpu": 1024}
_TILE_BYTES = {1: 32768, 2: 32768, 4: 16384}
# tl.dot takes no fewer.
_MIN_DOT = 16
# Programs for one long request: enough to keep some hundred multiprocessors reading. Each reads
# what the others found, which limits the splits of one head.
_PROGRAMS = 1024
_SPLITS = (64, 256)
# Score of a key that a query may not see. Finite, so that the difference of two is not NaN.
HIDDEN: tl.constexpr = tl.constexpr(-1.0e30)


@dataclass(frozen=True)
class Turn:
    """Rows of a window that are multiplied at a time, and how heads and keys are tiled for them.

    The layer and the window alone decide, not the batch nor the part of the heads that is launched:
    a request's sums are formed alike in every batch, bit for bit.

    first_row, num_rows: the rows.
    padded_rows: rows that a tile has for each of its heads.
    head_tile: query heads of one KV head in a tile.
    max_splits: programs that share the keys of one tile of heads, at most.
    """

    first_row: int
    num_rows: int
    padded_rows: int
    head_tile: int
    max_splits: int


@dataclass(frozen=True)
class Launch:
    """What the second pass is launched with: all that the first one was.

    grid: tiles of heads, splits of the keys, requests.
    softmax_sums: (F, tiles, splits, 2, rows) float32: by split of the keys the maximum of each
        row's scores, and the sum of exp2(score - maximum).
    arguments: the kernel's first ones, up to the softmax sums.
    tiles: the constants that say where in the batch a program and its rows are.
    constants: all constants, those of `tiles` among them.
    """

    grid: tuple[int, int, int]
    softmax_sums: Tensor
    arguments: tuple[Any, ...]
    tiles: dict[str, int]
    constants: dict[str, Any]


def turns(max_window: int, num_kv_heads: int, group: int) -> Iterator[Turn]:
    """The turns in which a window of `max_window` rows is handled, in order.

    group: query heads that share a KV head.
    """
    for first_row in range(0, max_window, _MAX_ROWS):
        num_rows = min(max_window - first_row, _MAX_ROWS)
        padded_rows = triton.next_power_of_2(num_rows)
        head_tile = min(triton.next_power_of_2(group), _MAX_ROWS // padded_rows)
        padded_rows = max(padded_rows, _MIN_DOT // head_tile)
        max_splits = _PROGRAMS // (num_kv_heads * triton.cdiv(group, head_tile))
        max_splits = min(max(max_splits, _SPLITS[0]), _SPLITS[1])
        yield Turn(first_row, num_rows, padded_rows, head_tile, max_splits)


def launch_row_sums(
    turn: Turn,
    queries: Tensor,
    keys: Tensor,
    block_tables: Tensor,
    num_keys: Tensor,
    windows: Tensor,
    max_num_keys: int,
    scale: float,
    soft_cap: float | None = None,
) -> Launch:
    """Launches the first pass over the keys; what it returns serves to launch the second.

    Args:
        turn: of the whole layer, of which the following may be a part.
        queries: (F, W, H, D), the model's dtype. Rows 0..windows[f]-1 are the queries of the last
            windows[f] keys of request f, in order; later rows are not read.
        keys: (num_blocks, G, block_size, D), the cache's dtype, any strides.
        block_tables: (F, max_blocks) int32, unit stride along a row.
        num_keys: (F,) int32, on the device as is the next one; 0 for padding.
        windows: (F,) int32, at most W and num_keys[f].
        max_num_keys: at least the largest of `num_keys`.
        scale: factor of query times stored key before the softmax. soft_cap: of the scaled
            products, see ``equations.softmax``; None without.
    """
    num_requests, _, num_heads, head_dim = queries.shape
    num_kv_heads, block_size = keys.shape[1:3]
    group = num_heads // num_kv_heads
    padded_dim = max(triton.next_power_of_2(head_dim), _MIN_DOT)
    width = queries.element_size()
    interpreted = queries.device.type == "cpu"
    block_keys = _BLOCK_KEYS[queries.device.type]
    if not interpreted:
        block_keys = min(max(_TILE_BYTES[width] // (padded_dim * width), _MIN_DOT), block_keys)
    grid = (
        num_kv_heads * triton.cdiv(group, turn.head_tile),
        min(triton.cdiv(max_num_keys, block_keys), turn.max_splits),
        num_requests,
    )
    rows = turn.head_tile * turn.padded_rows
    softmax_sums = torch.empty(
        num_requests, *grid[:2], 2, rows, dtype=torch.float32, device=queries.device
    )
    arguments = (
        queries,
        *queries.stride(),
        keys,
        *keys.stride(),
        block_tables,
        block_tables.stride(0),
        num_keys,
        windows,
        # In powers of two, which the hardware has an instruction for.
        *factors(scale, soft_cap, LOG2_E.value),
        softmax_sums,
    )
    tiles = dict(
        FIRST_ROW=turn.first_row,
        GROUP=group,
        HEAD_TILE=turn.head_tile,
        PADDED_ROWS=turn.padded_rows,
        BLOCK_KEYS=block_keys,
        MAX_SPLITS=turn.max_splits,
    )
    constants = dict(
        **tiles,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=block_size,
        # Triton's interpreter multiplies 16-bit floats as the integers that it keeps them in.
        UPCAST=interpreted,
        num_warps=4 if rows <= 32 and width < 4 else 8,
        num_stages=3,
    )
    row_sums_kernel[grid](*arguments, **constants)
    return Launch(grid, softmax_sums, arguments, tiles, constants)


@triton.jit
def split_keys(num_keys, BLOCK_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Begin and end of this program's keys, and the splits of this request.

    The request's own length decides, so that its sums are formed alike in every batch.
    """
    tiles = tl.cdiv(num_keys, BLOCK_KEYS)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, MAX_SPLITS), 1)
    begin = tl.program_id(1) * tiles_per_split * BLOCK_KEYS
    end = tl.minimum(begin + tiles_per_split * BLOCK_KEYS, num_keys)
    return begin, end, tl.cdiv(tiles, tiles_per_split)


@triton.jit
def load_queries(
    queries,
    request_stride,
    row_stride,
    head_stride,
    channel_stride,
    window,
    FIRST_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Queries of this program's heads, (R, PADDED_DIM) with R = HEAD_TILE * PADDED_ROWS.

    Returns them, their index in the window (R,) and whether they exist (R,); others are 0.
    """
    column = tl.arange(0, HEAD_TILE * PADDED_ROWS)
    row = FIRST_ROW + column % PADDED_ROWS
    HEAD_TILES: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    head_in_group = tl.program_id(0) % HEAD_TILES * HEAD_TILE + column // PADDED_ROWS
    head = tl.program_id(0) // HEAD_TILES * GROUP + head_in_group
    exists = (head_in_group < GROUP) & (row < window)
    channel = tl.arange(0, PADDED_DIM)
    pointer = queries + tl.program_id(2).to(tl.int64) * request_stride
    pointer += row[:, None] * row_stride + head[:, None] * head_stride
    tile = tl.load(
        pointer + channel[None, :] * channel_stride,
        mask=exists[:, None] & (channel < HEAD_DIM)[None, :],
        other=0.0,
    )
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile, row, exists


@triton.jit
def tile_scores(
    query_tile,
    last_visible,
    keys,
    block_stride,
    entry_stride,
    channel_stride,
    table,
    begin,
    num_keys,
    scale,
    soft_cap,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Scores of BLOCK_KEYS keys from `begin` on, (BLOCK_KEYS, R), `HIDDEN` where not visible.

    Keys are the rows, queries the columns: 64 rows or more are what Hopper's matrix instructions
    want, and there are always that many keys. It also leaves the sum over a window within a warp.
    """
    key = begin + tl.arange(0, BLOCK_KEYS)
    channel = tl.arange(0, PADDED_DIM)
    exists = key < num_keys
    block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    pointer = keys + block * block_stride + (key % BLOCK_SIZE) * entry_stride
    # Entries that no key was written to may hold NaN, which a factor of 0 would not undo.
    mask = exists[:, None]
    if HEAD_DIM != PADDED_DIM:
        mask = mask & (channel < HEAD_DIM)[None, :]
    key_tile = tl.load(pointer[:, None] + channel[None, :] * channel_stride, mask=mask, other=0.0)
    product = tl.dot(key_tile.to(query_tile.dtype), tl.trans(query_tile), input_precision="ieee")
    score = product * scale
    if soft_cap is not None:
        score = capped(score, soft_cap)
    return tl.where(key[:, None] <= last_visible[None, :], score, HIDDEN)


@triton.jit(
    do_not_specialize=["block_tables", "table_stride", "num_keys", "windows"],
)
def row_sums_kernel(
    queries,
    query_request_stride,
    query_row_stride,
    query_head_stride,
    query_channel_stride,
    keys,
    key_block_stride,
    key_head_stride,
    key_entry_stride,
    key_channel_stride,
    block_tables,
    table_stride,
    num_keys,
    windows,
    scale,
    soft_cap,
    partials,
    FIRST_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Maximum of each query's scores over one split of the keys, and sum of exp2(score - it)."""
    request = tl.program_id(2)
    length = tl.load(num_keys + request)
    begin, end, _ = split_keys(length, BLOCK_KEYS, MAX_SPLITS)
    if begin >= end:
        return
    window = tl.load(windows + request)
    query_tile, row, _ = load_queries(
        queries,
        query_request_stride,
        query_row_stride,
        query_head_stride,
        query_channel_stride,
        window,
        FIRST_ROW,
        GROUP,
        HEAD_TILE,
        PADDED_ROWS,
        HEAD_DIM,
        PADDED_DIM,
        UPCAST,
    )
    HEAD_TILES: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    keys += (tl.program_id(0) // HEAD_TILES).to(tl.int64) * key_head_stride
    table = block_tables + request.to(tl.int64) * table_stride

    # Each position of the tile keeps its own maximum and sum from tile to tile, so that nothing
    # has to cross threads before the end. Where a query has not seen a key yet the maximum is
    # HIDDEN and the sum of no meaning; the first visible key multiplies it by 0.
    ROWS: tl.constexpr = HEAD_TILE * PADDED_ROWS
    maxima = tl.full((BLOCK_KEYS, ROWS), HIDDEN, dtype=tl.float32)
    sums = tl.zeros((BLOCK_KEYS, ROWS), dtype=tl.float32)
    for first in range(begin, end, BLOCK_KEYS):
        scores = tile_scores(
            query_tile,
            length - window + row,
            keys,
            key_block_stride,
            key_entry_stride,
            key_channel_stride,
            table,
            first,
            length,
            scale,
            soft_cap,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            BLOCK_KEYS,
        )
        # One exponential serves both cases: the smaller of the two is what has to be scaled.
        ratio = tl.exp2(-tl.abs(scores - maxima))
        sums = tl.where(scores > maxima, sums * ratio + 1.0, sums + ratio)
        maxima = tl.maximum(maxima, scores)

    maximum = tl.max(maxima, axis=0)
    total = tl.sum(sums * tl.exp2(maxima - maximum[None, :]), axis=0)
    splits = tl.num_programs(1)
    index = (request.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * splits
    partial = partials + (index + tl.program_id(1)) * (2 * ROWS) + tl.arange(0, ROWS)
    tl.store(partial, maximum)
    tl.store(partial + ROWS, total)
