"""Attention of each prompt's last queries to its paged keys, summed over them, then pooled.

FastKV and SnapKV score the keys of a prompt this way, once per layer, when the prompt is in. The
batch is ragged: F requests, request f with its own number of keys, window and pooling kernel.
Scores of all requests lie side by side in one row per head, request f in columns
``offsets[f]:offsets[f + 1]``. Lengths are read on the device, so nothing here waits for it.
"""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.equations import saliency as dense
from vllm_kvx.ops.paged import PagedKV

# Query rows that one program multiplies with a tile of keys.
_MAX_ROWS = 64
# Keys per tile at most, and their bytes. float32 is multiplied without matrix instructions, from
# registers. An interpreted program costs the same whatever its size.
_BLOCK_KEYS = {"cuda": 128, "cpu": 1024}
_TILE_BYTES = {1: 32768, 2: 32768, 4: 16384}
_POOL_BLOCK = {"cuda": 1024, "cpu": 8192}
# tl.dot takes no fewer.
_MIN_DOT = 16
# Programs for one long request: enough to keep some hundred multiprocessors reading. Each reads
# what the others found, which limits the splits of one head.
_PROGRAMS = 1024
_SPLITS = (64, 256)
_LOG2_E = 1.4426950408889634
# Score of a key that a query may not see. Finite, so that the difference of two is not NaN.
_HIDDEN: tl.constexpr = tl.constexpr(-1.0e30)


def window_saliency(
    queries: Tensor,
    paged: PagedKV,
    block_tables: Tensor,
    num_keys: Tensor,
    windows: Tensor,
    offsets: Tensor,
    max_num_keys: int,
    total_keys: int,
    scale: float,
    key_scale: float = 1.0,
) -> Tensor:
    """Attention that each key outside the window gets from the window's queries, per query head.

    The rows are exact: fp32 softmax over every key that the query may see, window included. What
    a request gets does not depend on the others in its batch, bit for bit.

    Args:
        queries: (F, W, H, D), the model's dtype. Rows 0..windows[f]-1 are the queries of the last
            windows[f] keys of request f, in order; later rows are not read.
        paged: the layer's keys; entries past num_keys[f] are not read.
        block_tables: (F, max_blocks) int32, unit stride along a row.
        num_keys: (F,) int32, on the device as are the next two; 0 for padding.
        windows: (F,) int32, at most W and num_keys[f].
        offsets: (F + 1,) int64, exclusive cumulative sum of `num_keys`.
        max_num_keys: at least the largest of `num_keys`.
        total_keys: columns of the result, at least offsets[F].
        scale: factor of query times key before the softmax.
        key_scale: what a stored key is multiplied with to get the key, for an fp8 cache.

    Returns:
        (H, total_keys) float32. Columns of window keys hold 0; those from offsets[F] on are
        not written.
    """
    num_requests, max_window, num_heads, head_dim = queries.shape
    keys = paged.keys
    scores = torch.empty(num_heads, total_keys, dtype=torch.float32, device=queries.device)
    if not (num_requests and total_keys):
        return scores

    group = num_heads // paged.num_heads
    padded_dim = max(triton.next_power_of_2(head_dim), _MIN_DOT)
    interpreted = queries.device.type == "cpu"
    block_keys = _BLOCK_KEYS[queries.device.type]
    if not interpreted:
        width = queries.element_size()
        block_keys = min(max(_TILE_BYTES[width] // (padded_dim * width), _MIN_DOT), block_keys)
    # A wider window comes in turns, each of which adds to the scores of those before.
    for first_row in range(0, max_window, _MAX_ROWS):
        padded_rows = triton.next_power_of_2(min(max_window - first_row, _MAX_ROWS))
        head_tile = min(triton.next_power_of_2(group), _MAX_ROWS // padded_rows)
        padded_rows = max(padded_rows, _MIN_DOT // head_tile)
        head_tiles = triton.cdiv(group, head_tile)
        # Depends on the layer alone, not on the batch, for the promise of equal bits.
        max_splits = _PROGRAMS // (paged.num_heads * head_tiles)
        max_splits = min(max(max_splits, _SPLITS[0]), _SPLITS[1])
        grid = (
            paged.num_heads * head_tiles,
            min(triton.cdiv(max_num_keys, block_keys), max_splits),
            num_requests,
        )
        rows = head_tile * padded_rows
        partials = torch.empty(
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
            scale * key_scale * _LOG2_E,
            partials,
        )
        constants = dict(
            FIRST_ROW=first_row,
            GROUP=group,
            HEAD_TILE=head_tile,
            PADDED_ROWS=padded_rows,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            BLOCK_SIZE=paged.block_size,
            BLOCK_KEYS=block_keys,
            MAX_SPLITS=max_splits,
            # Triton's interpreter multiplies 16-bit floats as the integers that it keeps them in.
            UPCAST=interpreted,
            num_warps=4 if rows <= 32 and queries.element_size() < 4 else 8,
            num_stages=3,
        )
        _row_sums_kernel[grid](*arguments, **constants)
        _window_sums_kernel[grid](*arguments, scores, offsets, total_keys, **constants)
    return scores


@triton.jit
def _split(num_keys, BLOCK_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Begin and end of this program's keys, and the splits of this request.

    The request's own length decides, so that its sums are formed alike in every batch.
    """
    tiles = tl.cdiv(num_keys, BLOCK_KEYS)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, MAX_SPLITS), 1)
    begin = tl.program_id(1) * tiles_per_split * BLOCK_KEYS
    end = tl.minimum(begin + tiles_per_split * BLOCK_KEYS, num_keys)
    return begin, end, tl.cdiv(tiles, tiles_per_split)


@triton.jit
def _load_queries(
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
def _tile_scores(
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
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Scores of BLOCK_KEYS keys from `begin` on, (BLOCK_KEYS, R), `_HIDDEN` where not visible.

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
    return tl.where(key[:, None] <= last_visible[None, :], product * scale, _HIDDEN)


@triton.jit(
    do_not_specialize=["block_tables", "table_stride", "num_keys", "windows"],
)
def _row_sums_kernel(
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
    begin, end, _ = _split(length, BLOCK_KEYS, MAX_SPLITS)
    if begin >= end:
        return
    window = tl.load(windows + request)
    query_tile, row, _ = _load_queries(
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
    # _HIDDEN and the sum of no meaning; the first visible key multiplies it by 0.
    ROWS: tl.constexpr = HEAD_TILE * PADDED_ROWS
    maxima = tl.full((BLOCK_KEYS, ROWS), _HIDDEN, dtype=tl.float32)
    sums = tl.zeros((BLOCK_KEYS, ROWS), dtype=tl.float32)
    for first in range(begin, end, BLOCK_KEYS):
        scores = _tile_scores(
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


@triton.jit(
    do_not_specialize=[
        "block_tables",
        "table_stride",
        "num_keys",
        "windows",
        "offsets",
        "total_keys",
    ],
)
def _window_sums_kernel(
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
    partials,
    saliency,
    offsets,
    total_keys,
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
    """Scores again, now with each query's maximum and sum known; probabilities summed per head."""
    request = tl.program_id(2)
    length = tl.load(num_keys + request)
    begin, end, splits = _split(length, BLOCK_KEYS, MAX_SPLITS)
    if begin >= end:
        return
    window = tl.load(windows + request)
    query_tile, row, exists = _load_queries(
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

    ROWS: tl.constexpr = HEAD_TILE * PADDED_ROWS
    MERGED: tl.constexpr = 64
    column = tl.arange(0, ROWS)
    index = request.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    partials += index * tl.num_programs(1) * (2 * ROWS)
    maximum = tl.full((ROWS,), _HIDDEN, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(0, splits, MERGED):
        split = first + tl.arange(0, MERGED)[:, None]
        partial = partials + split * (2 * ROWS) + column[None, :]
        split_maxima = tl.load(partial, mask=split < splits, other=_HIDDEN)
        split_sums = tl.load(partial + ROWS, mask=split < splits, other=0.0)
        larger = tl.maximum(maximum, tl.max(split_maxima, axis=0))
        total *= tl.exp2(maximum - larger)
        total += tl.sum(split_sums * tl.exp2(split_maxima - larger[None, :]), axis=0)
        maximum = larger
    weight = tl.where(exists, 1.0 / total, 0.0)

    head = tl.arange(0, HEAD_TILE)
    head_in_group = tl.program_id(0) % HEAD_TILES * HEAD_TILE + head
    head = tl.program_id(0) // HEAD_TILES * GROUP + head_in_group
    saliency += tl.load(offsets + request) + head[None, :].to(tl.int64) * total_keys
    for first in range(begin, end, BLOCK_KEYS):
        scores = _tile_scores(
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
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            BLOCK_KEYS,
        )
        probabilities = tl.exp2(scores - maximum[None, :]) * weight[None, :]
        by_head = tl.reshape(probabilities, (BLOCK_KEYS, HEAD_TILE, PADDED_ROWS))
        key = first + tl.arange(0, BLOCK_KEYS)[:, None]
        result = tl.where(key < length - window, tl.sum(by_head, axis=2), 0.0)
        mask = (key < end) & (head_in_group < GROUP)[None, :]
        if FIRST_ROW > 0:
            result += tl.load(saliency + key, mask=mask, other=0.0)
        tl.store(saliency + key, result, mask=mask)


def window_saliency_reference(
    queries: Tensor,
    paged: PagedKV,
    block_tables: Tensor,
    num_keys: Tensor,
    windows: Tensor,
    offsets: Tensor,
    scale: float,
    key_scale: float = 1.0,
) -> Tensor:
    """`window_saliency` in plain torch, one request after the other; (H, offsets[F])."""
    scores = torch.zeros(queries.shape[2], int(offsets[-1]), device=queries.device)
    for f, (length, window) in enumerate(zip(num_keys.tolist(), windows.tolist(), strict=True)):
        keys = paged.dense_keys(block_tables[f], length)
        rows = queries[f, :window].transpose(0, 1)
        attention = dense.window_attention(rows, keys, scale * key_scale)
        first = int(offsets[f])
        scores[:, first : first + length - window] = dense.saliency(attention)
    return scores


def pool_per_kv_head(
    scores: Tensor,
    num_kv_heads: int,
    num_keys: Tensor,
    windows: Tensor,
    offsets: Tensor,
    kernels: Tensor,
    max_num_keys: int,
) -> Tensor:
    """Max-pools each query head's scores and sums the query heads of each KV head, in order.

    Neighbours are the request's keys outside its window, at the edges fewer than the kernel.

    Args:
        scores: (H, total_keys) float32, at least 0, as from `window_saliency`; unit stride
            along a row.
        num_kv_heads: G; 1 sums over all heads.
        num_keys, windows, offsets: as in `window_saliency`.
        kernels: (F,) int32, odd; 1 does not pool.
        max_num_keys: at least the largest of `num_keys`.

    Returns:
        (G, total_keys) float32. Columns of window keys hold 0; those from offsets[F] on are
        not written.
    """
    num_heads, total_keys = scores.shape
    pooled = torch.empty(num_kv_heads, total_keys, dtype=torch.float32, device=scores.device)
    if not (num_keys.shape[0] and total_keys):
        return pooled
    block = _POOL_BLOCK[scores.device.type]
    grid = (triton.cdiv(max_num_keys, block), num_kv_heads, num_keys.shape[0])
    _pool_kernel[grid](
        scores,
        scores.stride(0),
        num_keys,
        windows,
        offsets,
        kernels,
        pooled,
        total_keys,
        GROUP=num_heads // num_kv_heads,
        BLOCK=block,
    )
    return pooled


@triton.jit(
    do_not_specialize=[
        "scores_stride",
        "num_keys",
        "windows",
        "offsets",
        "kernels",
        "pooled_stride",
    ],
)
def _pool_kernel(
    scores,
    scores_stride,
    num_keys,
    windows,
    offsets,
    kernels,
    pooled,
    pooled_stride,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(2)
    length = tl.load(num_keys + request)
    first = tl.program_id(0) * BLOCK
    if first >= length:
        return
    outside = length - tl.load(windows + request)
    reach = tl.load(kernels + request) // 2
    offset = tl.load(offsets + request)
    kv_head = tl.program_id(1).to(tl.int64)
    key = first + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for head in range(GROUP):
        row = scores + (kv_head * GROUP + head) * scores_stride + offset
        best = tl.zeros((BLOCK,), dtype=tl.float32)
        for shift in range(-reach, reach + 1):
            near = key + shift
            mask = (near >= 0) & (near < outside)
            best = tl.maximum(best, tl.load(row + near, mask=mask, other=0.0))
        total += best
    result = tl.where(key < outside, total, 0.0)
    tl.store(pooled + kv_head * pooled_stride + offset + key, result, mask=key < length)


def pool_per_kv_head_reference(
    scores: Tensor,
    num_kv_heads: int,
    num_keys: Tensor,
    windows: Tensor,
    offsets: Tensor,
    kernels: Tensor,
) -> Tensor:
    """`pool_per_kv_head` in plain torch, one request after the other; (G, offsets[F])."""
    pooled = scores.new_zeros(num_kv_heads, int(offsets[-1]))
    sizes = (num_keys.tolist(), windows.tolist(), kernels.tolist())
    for f, (length, window, kernel) in enumerate(zip(*sizes, strict=True)):
        if length == window:
            continue
        columns = slice(int(offsets[f]), int(offsets[f]) + length - window)
        best = dense.max_pool(scores[:, columns], kernel)
        pooled[:, columns] = dense.per_kv_head(best, num_kv_heads)
    return pooled
