"""Causal attention of chosen tokens of prompts to all paged keys at or before them.

The layer that selects tokens stores every token of a prompt and runs the chosen ones alone. Their
positions have gaps, where vLLM's attention takes the last rows of a sequence.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvx.equations.softmax import capped as capped_reference
from vllm_kvx.equations.softmax import softmax
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.softmax import LOG2_E, capped, factors

# Rows and keys of a tile; float32 is multiplied without matrix instructions, from registers.
_BLOCK_ROWS = {2: 128, 4: 32}
_BLOCK_KEYS = {2: 64, 4: 32}
# tl.dot takes no fewer channels.
_MIN_DOT = 16
# Scores that the torch path holds at a time.
_MOST_SCORES = 1 << 24


@dataclass(frozen=True)
class ChosenRows:
    """Rows of a pass: chosen tokens of P prompts, each prompt's together and in order.

    Attributes:
        requests: (P,) int64 on the host, places of the prompts in the step's batch.
        counts: (P,) int32 on the host, rows of each.
        positions: (N,) int64 on the device, up to which each sees.
        block_tables: (P, B) int32, unit stride along a row.
        firsts: (N,) int32, the first entry that each sees, ascending within a prompt; None for 0.
    """

    requests: np.ndarray
    counts: np.ndarray
    positions: Tensor
    block_tables: Tensor
    firsts: Tensor | None = None


def attend_chosen(
    query: Tensor,
    paged: PagedKV,
    rows: ChosenRows,
    out: Tensor,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Writes the attention of `rows` to `out`; each sees the entries up to its own position,
    from its first one on.

    Args:
        query, out: (N, H, D), the model's dtype. Rows past those of `rows` are left alone.
        paged: the layer's entries; entry i is that of position i.
        scale: factor of query times key before the softmax.
        key_scale, value_scale: what stored keys and values are multiplied with, for an fp8 cache.
        soft_cap: of the logits, above 0; sinks: (H,), any float dtype; see ``equations.softmax``.
            None where the model's attention has none.
    """
    run = attend_chosen_reference if query.device.type == "cpu" else attend_chosen_kernel
    run(query, paged, rows, out, scale, key_scale, value_scale, soft_cap, sinks)


def attend_chosen_reference(
    query: Tensor,
    paged: PagedKV,
    rows: ChosenRows,
    out: Tensor,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """The same in plain torch, which the CPU runs."""
    first, heads = 0, query.shape[1]
    for count, table in zip(rows.counts.tolist(), rows.block_tables, strict=True):
        last = first + count
        num_keys = int(rows.positions[last - 1]) + 1
        keys = paged.dense_keys(table, num_keys).float() * key_scale
        values = paged.dense_values(table, num_keys).float() * value_scale
        keys, values = (
            part.repeat_interleave(heads // paged.num_heads, dim=0) for part in (keys, values)
        )
        step = max(_MOST_SCORES // (heads * num_keys), 1)
        at = torch.arange(num_keys, device=query.device)
        for begin in range(first, last, step):
            part = slice(begin, min(begin + step, last))
            scores = query[part].transpose(0, 1).float() @ keys.transpose(1, 2) * scale
            hidden = at > rows.positions[part, None]
            if rows.firsts is not None:
                hidden |= at < rows.firsts[part, None]
            scores = capped_reference(scores, soft_cap).masked_fill(hidden, -torch.inf)
            weights = softmax(scores, sinks)
            out[part] = (weights @ values).transpose(0, 1).to(out.dtype)
        first = last


def attend_chosen_kernel(
    query: Tensor,
    paged: PagedKV,
    rows: ChosenRows,
    out: Tensor,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """The same by a Triton kernel."""
    block_rows = _BLOCK_ROWS[query.element_size()]
    tiles = async_tensor_h2d(_tiles_of(rows.counts, block_rows), device=query.device)
    scales = (scale, key_scale, value_scale)
    where = (rows.positions, rows.block_tables, tiles)
    launch(query, paged, *where, out, *scales, soft_cap, sinks, rows.firsts)


def launch(
    query: Tensor,
    paged: PagedKV,
    positions: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    out: Tensor,
    scale: float,
    key_scale: float,
    value_scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    firsts: Tensor | None = None,
) -> None:
    """The kernel of `attend_chosen_kernel`, for all that is on the device.

    positions, block_tables, firsts: of ``ChosenRows``. tiles: as `_tiles_of` has them.
    """
    width, device = query.element_size(), query.device
    block_rows, block_keys = _BLOCK_ROWS[width], _BLOCK_KEYS[width]
    heads, head_dim = query.shape[1:]
    _attend_kernel[(tiles.shape[1], heads)](
        query,
        *query.stride(),
        out,
        *out.stride(),
        paged.keys,
        *paged.keys.stride(),
        paged.values,
        *paged.values.stride(),
        positions,
        firsts,
        block_tables,
        block_tables.stride(0),
        tiles,
        tiles.shape[1],
        *factors(scale * key_scale, soft_cap, LOG2_E.value),
        sinks,
        value_scale,
        GROUP=heads // paged.num_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(triton.next_power_of_2(head_dim), _MIN_DOT),
        BLOCK_SIZE=paged.block_size,
        BLOCK_ROWS=block_rows,
        BLOCK_KEYS=block_keys,
        # Triton's interpreter multiplies 16-bit floats as the integers that it keeps them in.
        UPCAST=device.type == "cpu",
        num_warps=8,
        num_stages=3,
    )


def _tiles_of(counts: np.ndarray, block_rows: int) -> np.ndarray:
    """(3, T) int32: prompt, first row and end of the rows of each tile, the last ones first.

    A prompt's last rows see most, and would otherwise be waited for at the end.
    """
    starts = np.cumsum(counts) - counts
    tiles = [
        (prompt, begin, start + count)
        for prompt, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True))
        for begin in range(start, start + count, block_rows)
    ]
    return np.ascontiguousarray(np.array(tiles[::-1], dtype=np.int32).T)


@triton.jit(do_not_specialize=["firsts", "block_tables", "table_stride", "num_tiles", "sinks"])
def _attend_kernel(
    query,
    query_row_stride,
    query_head_stride,
    query_channel_stride,
    out,
    out_row_stride,
    out_head_stride,
    out_channel_stride,
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
    positions,
    firsts,
    block_tables,
    table_stride,
    tiles,
    num_tiles,
    scale,
    soft_cap,
    sinks,
    value_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of a prompt's rows in one query head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    prompt = tl.load(tiles + tile)
    row = tl.load(tiles + num_tiles + tile) + tl.arange(0, BLOCK_ROWS)
    exists = row < tl.load(tiles + 2 * num_tiles + tile)
    position = tl.load(positions + row, mask=exists, other=-1).to(tl.int32)
    # Rows are in order, and those that do not exist come last.
    highest = tl.max(position, axis=0)
    lowest = tl.min(tl.where(exists, position, highest), axis=0)
    channel = tl.arange(0, PADDED_DIM)
    in_head = channel < HEAD_DIM
    row = row.to(tl.int64)
    query_tile = tl.load(
        query
        + row[:, None] * query_row_stride
        + head * query_head_stride
        + channel[None, :] * query_channel_stride,
        mask=exists[:, None] & in_head[None, :],
        other=0.0,
    )
    if UPCAST:
        query_tile = query_tile.to(tl.float32)
    table = block_tables + prompt.to(tl.int64) * table_stride
    kv_head = (head // GROUP).to(tl.int64)
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride

    maximum = tl.full((BLOCK_ROWS,), -1.0e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    if sinks is not None:  # As if a key with this logit and a value of 0 came first.
        maximum = tl.zeros_like(maximum) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    sums = tl.zeros((BLOCK_ROWS, PADDED_DIM), dtype=tl.float32)
    # Tiles of keys that every row sees whole need no mask. All of a window's have one: it is short.
    if firsts is None:
        begin = 0
        seen_by_all = (lowest + 1) // BLOCK_KEYS * BLOCK_KEYS
    else:
        first_seen = tl.load(firsts + row, mask=exists, other=0)
        begin = tl.min(tl.where(exists, first_seen, highest), axis=0) // BLOCK_KEYS * BLOCK_KEYS
        seen_by_all = begin
    for first in range(begin, seen_by_all, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
        entry = key % BLOCK_SIZE
        key_tile = tl.load(
            keys
            + (block * key_block_stride + entry * key_entry_stride)[None, :]
            + channel[:, None] * key_channel_stride,
            mask=in_head[:, None],
            other=0.0,
        ).to(query_tile.dtype)
        value_tile = tl.load(
            values
            + (block * value_block_stride + entry * value_entry_stride)[:, None]
            + channel[None, :] * value_channel_stride,
            mask=in_head[None, :],
            other=0.0,
        ).to(query_tile.dtype)
        scores = tl.dot(query_tile, key_tile, input_precision="ieee") * scale
        if soft_cap is not None:
            scores = capped(scores, soft_cap)
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_maximum[:, None])
        factor = tl.exp2(maximum - new_maximum)
        total = total * factor + tl.sum(weights, axis=1)
        sums = sums * factor[:, None]
        sums += tl.dot(weights.to(query_tile.dtype), value_tile, input_precision="ieee")
        maximum = new_maximum
    for first in range(seen_by_all, highest + 1, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        is_there = key <= highest
        block = tl.load(table + key // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
        entry = key % BLOCK_SIZE
        # Entries that nothing was written to may hold NaN, which a weight of 0 would not undo.
        key_tile = tl.load(
            keys
            + (block * key_block_stride + entry * key_entry_stride)[None, :]
            + channel[:, None] * key_channel_stride,
            mask=is_there[None, :] & in_head[:, None],
            other=0.0,
        ).to(query_tile.dtype)
        value_tile = tl.load(
            values
            + (block * value_block_stride + entry * value_entry_stride)[:, None]
            + channel[None, :] * value_channel_stride,
            mask=is_there[:, None] & in_head[None, :],
            other=0.0,
        ).to(query_tile.dtype)
        scores = tl.dot(query_tile, key_tile, input_precision="ieee") * scale
        if soft_cap is not None:
            scores = capped(scores, soft_cap)
        seen = key[None, :] <= position[:, None]
        if firsts is not None:
            seen &= key[None, :] >= first_seen[:, None]
        # A tile before a row's first key weighs nothing once that key has come.
        scores = tl.where(seen, scores, -1.0e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_maximum[:, None])
        factor = tl.exp2(maximum - new_maximum)
        total = total * factor + tl.sum(weights, axis=1)
        sums = sums * factor[:, None]
        sums += tl.dot(weights.to(query_tile.dtype), value_tile, input_precision="ieee")
        maximum = new_maximum
    tl.store(
        out
        + row[:, None] * out_row_stride
        + head * out_head_stride
        + channel[None, :] * out_channel_stride,
        (sums / total[:, None] * value_scale).to(out.dtype.element_ty),
        mask=exists[:, None] & in_head[None, :],
    )
