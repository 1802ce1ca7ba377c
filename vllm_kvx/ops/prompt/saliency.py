"""Attention of each prompt's last queries to its paged keys, their sum or the largest of them.

FastKV and SnapKV score the keys of a prompt this way, once per layer, when the prompt is in; `pool`
is their next step. The batch is ragged: F requests, request f with its own number of keys and
window. Scores of all requests lie side by side in one row per head, request f in columns
``offsets[f]:offsets[f + 1]``. Lengths are read on the device, so nothing here waits for it.
"""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.equations import saliency as dense
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.window_tiles import (
    HIDDEN,
    launch_row_sums,
    load_queries,
    split_keys,
    tile_scores,
    turns,
)
from vllm_kvx.ops.softmax import add_sinks


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
    reduction: str = "sum",
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention that each key outside the window gets from the window's queries, per query head.

    The rows are exact: fp32 softmax over every key that the query may see, window included, and
    over the model's sinks, which take their share. What a request gets does not depend on the
    others in its batch, bit for bit.

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
        reduction: over the window's queries, `sum` or `max`.
        soft_cap: of the logits, above 0; sinks: (H,), any float dtype; see ``equations.softmax``.
            None where the model's attention has none.

    Returns:
        (H, total_keys) float32. Columns of window keys hold 0; those from offsets[F] on are
        not written.
    """
    num_requests, max_window, num_heads, _ = queries.shape
    scores = torch.empty(num_heads, total_keys, dtype=torch.float32, device=queries.device)
    if not (num_requests and total_keys):
        return scores
    # A wider window comes in turns, each of which goes on with the scores of those before.
    for turn in turns(max_window, paged.num_heads, num_heads // paged.num_heads):
        launch = launch_row_sums(
            turn,
            queries,
            paged.keys,
            block_tables,
            num_keys,
            windows,
            max_num_keys,
            scale * key_scale,
            soft_cap,
        )
        _window_sums_kernel[launch.grid](
            *launch.arguments,
            scores,
            offsets,
            total_keys,
            sinks,
            MAXIMUM=reduction == "max",
            **launch.constants,
        )
    return scores


@triton.jit(
    do_not_specialize=[
        "block_tables",
        "table_stride",
        "num_keys",
        "windows",
        "offsets",
        "total_keys",
        "sinks",
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
    soft_cap,
    partials,
    saliency,
    offsets,
    total_keys,
    sinks,
    MAXIMUM: tl.constexpr,
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
    """Scores again, now with each query's maximum and sum known; probabilities reduced per head."""
    request = tl.program_id(2)
    length = tl.load(num_keys + request)
    begin, end, splits = split_keys(length, BLOCK_KEYS, MAX_SPLITS)
    if begin >= end:
        return
    window = tl.load(windows + request)
    query_tile, row, exists = load_queries(
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
    maximum = tl.full((ROWS,), HIDDEN, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(0, splits, MERGED):
        split = first + tl.arange(0, MERGED)[:, None]
        partial = partials + split * (2 * ROWS) + column[None, :]
        split_maxima = tl.load(partial, mask=split < splits, other=HIDDEN)
        split_sums = tl.load(partial + ROWS, mask=split < splits, other=0.0)
        larger = tl.maximum(maximum, tl.max(split_maxima, axis=0))
        total *= tl.exp2(maximum - larger)
        total += tl.sum(split_sums * tl.exp2(split_maxima - larger[None, :]), axis=0)
        maximum = larger
    if sinks is not None:
        in_group = tl.program_id(0) % HEAD_TILES * HEAD_TILE + column // PADDED_ROWS
        one = tl.program_id(0) // HEAD_TILES * GROUP + in_group
        maximum, total = add_sinks(maximum, total, sinks, one, exists)
    weight = tl.where(exists, 1.0 / total, 0.0)

    head = tl.arange(0, HEAD_TILE)
    head_in_group = tl.program_id(0) % HEAD_TILES * HEAD_TILE + head
    head = tl.program_id(0) // HEAD_TILES * GROUP + head_in_group
    saliency += tl.load(offsets + request) + head[None, :].to(tl.int64) * total_keys
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
        probabilities = tl.exp2(scores - maximum[None, :]) * weight[None, :]
        by_head = tl.reshape(probabilities, (BLOCK_KEYS, HEAD_TILE, PADDED_ROWS))
        key = first + tl.arange(0, BLOCK_KEYS)[:, None]
        result = tl.max(by_head, axis=2) if MAXIMUM else tl.sum(by_head, axis=2)
        result = tl.where(key < length - window, result, 0.0)
        mask = (key < end) & (head_in_group < GROUP)[None, :]
        if FIRST_ROW > 0:
            before = tl.load(saliency + key, mask=mask, other=0.0)
            result = tl.maximum(result, before) if MAXIMUM else result + before
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
    reduction: str = "sum",
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`window_saliency` in plain torch, one request after the other; (H, offsets[F])."""
    scores = torch.zeros(queries.shape[2], int(offsets[-1]), device=queries.device)
    for f, (length, window) in enumerate(zip(num_keys.tolist(), windows.tolist(), strict=True)):
        keys = paged.dense_keys(block_tables[f], length)
        rows = queries[f, :window].transpose(0, 1)
        attention = dense.window_attention(rows, keys, scale * key_scale, soft_cap, sinks)
        first = int(offsets[f])
        scores[:, first : first + length - window] = dense.saliency(attention, reduction)
    return scores
