"""How broad or focused each head's attention is: StructKV's metrics (Eq. 4-6), from paged keys.

They are those of `equations.pivot.attention_metrics`, per query head and request. Lengths are read
on the device, so nothing here waits for it. Keys are read twice, as for the saliency: once for
the sums of the softmax rows, once for the probabilities themselves. These go to a scratch, where
a program per row finds the tenth of them that is largest.
"""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.equations.pivot import attention_metrics
from vllm_kvx.equations.softmax import capped, softmax
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.metrics_scratch import ALIGNMENT, parts, row_length
from vllm_kvx.ops.prompt.select import threshold
from vllm_kvx.ops.prompt.window_tiles import (
    HIDDEN,
    Turn,
    launch_row_sums,
    load_queries,
    split_keys,
    tile_scores,
    turns,
)
from vllm_kvx.ops.softmax import add_sinks

# Probabilities that the program of one row reads at a time.
_ROW_BLOCK = 8192
_ALIGNMENT = ALIGNMENT
# Splits whose partial sums are loaded at a time; also rows of the window.
_MERGED: tl.constexpr = tl.constexpr(64)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


def window_metrics(
    queries: Tensor,
    paged: PagedKV,
    block_tables: Tensor,
    num_keys: Tensor,
    windows: Tensor,
    max_num_keys: int,
    scale: float,
    key_scale: float = 1.0,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Entropy, sparsity and variance of each head's attention, means over the window's queries.

    Entropy is in nats; sparsity is the mass of the tenth of the keys that get most; variance is
    that of the attention that the visible keys get, around their mean. All fp32, from fp32
    softmax rows; what goes to the model's sinks counts in no metric. What a request gets does not
    depend on the others in its batch, bit for bit.

    Args:
        As for `saliency.window_saliency`, of which this takes no offsets.

    Returns:
        (F, H, 3) float32: entropy, sparsity, variance; 0 for padding.
    """
    num_requests, max_window, num_heads, _ = queries.shape
    metrics = torch.zeros(num_requests, num_heads, 3, dtype=torch.float32, device=queries.device)
    if not (metrics.numel() and max_window and max_num_keys):
        return metrics
    group = num_heads // paged.num_heads
    by_row = metrics.new_empty(num_requests, num_heads, max_window, 3)
    length = row_length(max_num_keys)
    for turn in turns(max_window, paged.num_heads, group):
        for requests, kv_heads, heads in parts(turn, num_requests, paged.num_heads, group, length):
            _rows_metrics(
                turn,
                queries[requests, :, heads],
                paged.keys[:, kv_heads],
                block_tables[requests],
                num_keys[requests],
                windows[requests],
                max_num_keys,
                scale * key_scale,
                soft_cap,
                None if sinks is None else sinks[heads],
                by_row[requests, heads],
                length,
            )
    _mean_kernel[(num_heads, num_requests)](by_row, windows, metrics, max_window)
    return metrics


def _rows_metrics(
    turn: Turn,
    queries: Tensor,
    keys: Tensor,
    block_tables: Tensor,
    num_keys: Tensor,
    windows: Tensor,
    max_num_keys: int,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    by_row: Tensor,
    row_length: int,
) -> None:
    """Metrics of the window's rows of one turn, all at once.

    Args:
        turn, ..., soft_cap: as for `launch_row_sums`, of part of the requests and heads.
        sinks: of these heads; None without.
        by_row: (F, H, W, 3) float32, the result; rows past a request's window are not written.
        row_length: floats per row of the scratch, at least max_num_keys.
    """
    num_requests, _, num_heads, _ = queries.shape
    launch = launch_row_sums(
        turn, queries, keys, block_tables, num_keys, windows, max_num_keys, scale, soft_cap
    )
    metric_sums = torch.empty_like(launch.softmax_sums)
    probabilities = by_row.new_empty(num_requests, num_heads, turn.num_rows, row_length)
    _probabilities_kernel[launch.grid](
        *launch.arguments,
        metric_sums,
        probabilities,
        row_length,
        sinks,
        NUM_ROWS=turn.num_rows,
        **launch.constants,
    )
    _rows_kernel[(turn.num_rows, num_heads, num_requests)](
        probabilities,
        row_length,
        metric_sums,
        launch.grid[1],
        num_keys,
        windows,
        by_row,
        by_row.stride(0),
        by_row.stride(1),
        **launch.tiles,
        BLOCK=_ROW_BLOCK,
        num_warps=16,
    )


@triton.jit(do_not_specialize=["block_tables", "table_stride", "num_keys", "windows", "sinks"])
def _probabilities_kernel(
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
    softmax_sums,
    metric_sums,
    probabilities,
    row_length,
    sinks,
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
    NUM_ROWS: tl.constexpr,
):
    """Probabilities of one split of the keys, its part of the entropy and squared deviations.

    Up to the next multiple of `_ALIGNMENT`, keys that do not exist are written as 0.
    """
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
    kv_head = tl.program_id(0) // HEAD_TILES
    keys += kv_head.to(tl.int64) * key_head_stride
    table = block_tables + request.to(tl.int64) * table_stride

    ROWS: tl.constexpr = HEAD_TILE * PADDED_ROWS
    column = tl.arange(0, ROWS)
    index = request.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    index *= tl.num_programs(1)
    softmax_sums += index * (2 * ROWS) + column[None, :]
    maximum = tl.full((ROWS,), HIDDEN, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(0, splits, _MERGED):
        split = first + tl.arange(0, _MERGED)[:, None]
        partial = softmax_sums + split * (2 * ROWS)
        split_maxima = tl.load(partial, mask=split < splits, other=HIDDEN)
        split_sums = tl.load(partial + ROWS, mask=split < splits, other=0.0)
        larger = tl.maximum(maximum, tl.max(split_maxima, axis=0))
        total *= tl.exp2(maximum - larger)
        total += tl.sum(split_sums * tl.exp2(split_maxima - larger[None, :]), axis=0)
        maximum = larger
    head_in_group = tl.program_id(0) % HEAD_TILES * HEAD_TILE + column // PADDED_ROWS
    last_visible = length - window + row
    uniform = tl.where(exists, 1.0 / (last_visible + 1).to(tl.float32), 0.0)
    if sinks is not None:
        highest, mass = maximum, total
        of_head = sinks + kv_head * GROUP
        maximum, total = add_sinks(highest, mass, of_head, head_in_group, exists)
        # The keys' share, from what it is made of: one minus the sinks' would lose its digits.
        uniform *= tl.where(exists, mass * tl.exp2(highest - maximum) / total, 0.0)
    weight = tl.where(exists, 1.0 / total, 0.0)
    bits = tl.where(exists, tl.log2(total), 0.0)

    head = (request.to(tl.int64) * (tl.num_programs(0) // HEAD_TILES) + kv_head) * GROUP
    probabilities_row = (head + head_in_group) * NUM_ROWS + column % PADDED_ROWS
    probabilities += probabilities_row[None, :] * row_length
    padded_end = tl.cdiv(end, _ALIGNMENT) * _ALIGNMENT
    # Each position of the tile keeps its own sums from tile to tile, so that nothing has to cross
    # threads before the end.
    entropy = tl.zeros((BLOCK_KEYS, ROWS), dtype=tl.float32)
    deviation = tl.zeros((BLOCK_KEYS, ROWS), dtype=tl.float32)
    for first in range(begin, end, BLOCK_KEYS):
        scores = tile_scores(
            query_tile,
            last_visible,
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
        below = maximum[None, :] - scores
        probability = tl.exp2(-below) * weight[None, :]
        # Hidden keys are far below, but finitely: their probability of 0 makes the product 0.
        entropy += probability * (below + bits[None, :])
        key = first + tl.arange(0, BLOCK_KEYS)[:, None]
        # Squares of differences, not differences of squares, of which little would be left.
        step = tl.where(key <= last_visible[None, :], probability - uniform[None, :], 0.0)
        deviation += step * step
        tl.store(probabilities + key, probability, mask=(key < padded_end) & exists[None, :])

    partial = metric_sums + (index + tl.program_id(1)) * (2 * ROWS) + column
    tl.store(partial, tl.sum(entropy, axis=0))
    tl.store(partial + ROWS, tl.sum(deviation, axis=0))


@triton.jit(do_not_specialize=["num_splits", "num_keys", "windows", "by_row"])
def _rows_kernel(
    probabilities,
    row_length,
    metric_sums,
    num_splits,
    num_keys,
    windows,
    by_row,
    by_row_request_stride,
    by_row_head_stride,
    FIRST_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Metrics of one row of attention: the split sums added up, and the mass of the top tenth."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    length = tl.load(num_keys + request)
    window = tl.load(windows + request)
    if FIRST_ROW + row >= window:
        return

    _, _, splits = split_keys(length, BLOCK_KEYS, MAX_SPLITS)
    HEAD_TILES: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    ROWS: tl.constexpr = HEAD_TILE * PADDED_ROWS
    head_in_group = head % GROUP
    tile = head // GROUP * HEAD_TILES + head_in_group // HEAD_TILE
    index = request * (tl.num_programs(1) // GROUP * HEAD_TILES) + tile
    metric_sums += index * num_splits * (2 * ROWS) + head_in_group % HEAD_TILE * PADDED_ROWS + row
    entropies = tl.zeros((_MERGED,), dtype=tl.float32)
    deviations = tl.zeros((_MERGED,), dtype=tl.float32)
    for first in range(0, splits, _MERGED):
        split = first + tl.arange(0, _MERGED)
        partial = metric_sums + split * (2 * ROWS)
        entropies += tl.load(partial, mask=split < splits, other=0.0)
        deviations += tl.load(partial + ROWS, mask=split < splits, other=0.0)
    visible = length - window + FIRST_ROW + row + 1

    # int(0.1 * length) in float64 is this up to two million, of which tests make sure.
    wanted = tl.maximum(length // 10, 1)
    # The zeros that pad the row lose to every key, or tie with keys that weigh nothing.
    padded = tl.cdiv(length, _ALIGNMENT) * _ALIGNMENT
    index = (request * tl.num_programs(1) + head) * tl.num_programs(0) + row
    probabilities += index * row_length
    low, ties = threshold(probabilities, padded, wanted, BLOCK)
    above = tl.zeros((BLOCK,), dtype=tl.float32)
    equal = tl.zeros((BLOCK,), dtype=tl.int32)
    for begin in range(0, padded, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        value = tl.load(probabilities + key, mask=key < padded, other=0.0)
        bits = value.to(tl.int32, bitcast=True)
        above += tl.where(bits > low, value, 0.0)
        equal += ((bits == low) & (key < padded)).to(tl.int32)
    ties = tl.minimum(ties, tl.sum(equal))
    mass = tl.sum(above)
    # Without a tie the bound need not be a probability, or any number.
    if ties > 0:
        mass += ties.to(tl.float32) * low.to(tl.float32, bitcast=True)

    by_row += request * by_row_request_stride + head.to(tl.int64) * by_row_head_stride
    by_row += (FIRST_ROW + row) * 3
    tl.store(by_row, tl.sum(entropies) * _LN_2)
    tl.store(by_row + 1, mass)
    tl.store(by_row + 2, tl.sum(deviations) / visible.to(tl.float32))


@triton.jit(do_not_specialize=["windows", "max_window"])
def _mean_kernel(by_row, windows, metrics, max_window):
    """Means over the window of one head, (F, H, W, 3) -> (F, H, 3); in one order in every batch."""
    request = tl.program_id(1).to(tl.int64)
    index = request * tl.num_programs(0) + tl.program_id(0)
    window = tl.load(windows + request)
    metric = tl.arange(0, 4)[None, :]
    by_row += index * max_window * 3 + metric
    total = tl.zeros((_MERGED, 4), dtype=tl.float32)
    for first in range(0, window, _MERGED):
        row = first + tl.arange(0, _MERGED)[:, None]
        total += tl.load(by_row + row * 3, mask=(row < window) & (metric < 3), other=0.0)
    mean = tl.sum(total, axis=0) / tl.maximum(window, 1).to(tl.float32)
    metric = tl.arange(0, 4)
    tl.store(metrics + index * 3 + metric, mean, mask=metric < 3)


def window_metrics_reference(
    queries: Tensor,
    paged: PagedKV,
    block_tables: Tensor,
    num_keys: Tensor,
    windows: Tensor,
    scale: float,
    key_scale: float = 1.0,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`window_metrics` in plain torch and float64, one request after the other; (F, H, 3)."""
    num_requests, _, num_heads, _ = queries.shape
    group = num_heads // paged.num_heads
    metrics = torch.zeros(num_requests, num_heads, 3, dtype=torch.float64, device=queries.device)
    for f, (length, window) in enumerate(zip(num_keys.tolist(), windows.tolist(), strict=True)):
        if not window:
            continue
        keys = paged.dense_keys(block_tables[f], length)
        position = torch.arange(length, device=keys.device)
        hidden = position > position[length - window :, None]
        for head in range(num_heads):
            rows = queries[f, :window, head].double() @ keys[head // group].double().T
            rows = capped(rows * (scale * key_scale), soft_cap).masked_fill(hidden, float("-inf"))
            of_head = None if sinks is None else sinks[head : head + 1]
            metrics[f, head] = torch.stack(attention_metrics(softmax(rows[None], of_head)))
    return metrics
