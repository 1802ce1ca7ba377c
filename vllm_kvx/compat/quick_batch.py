"""Kernels that prepare a batch and take in what it sampled, for all of its rows at once.

See ``quick_kernels``. Parameters are those of vLLM's kernels, whose code says what they hold.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

# Memory of other types is left to the interpreter.
_TYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


def _at(address: int, shape: Sequence[int], dtype: Any = np.int32) -> Any:
    """An array of memory that somebody else holds."""
    count = int(np.prod(shape))
    memory = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(int(address))
    return np.frombuffer(memory, dtype, count).reshape(shape)


def compute_slot_mappings(
    grid: Sequence[int],
    max_num_tokens: int,
    idx_mapping: Any,
    query_start_loc: Any,
    pos: Any,
    block_table_ptrs: Any,
    block_table_strides: Any,
    block_sizes: Any,
    slot_mapping_enabled: Any,
    dcp_sharded: Any,
    slot_mappings_ptr: Any,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> bool:
    """Not with context parallelism, and not of positions beyond a block table's row."""
    starts = query_start_loc.numpy()[: grid[1]]
    first, end = int(starts[0]), int(starts[-1])
    positions, out = pos.numpy()[first:end], slot_mappings_ptr.numpy()
    if CP_SIZE != 1 or out.strides[0] != slot_mappings_stride * out.itemsize:
        return False
    sizes, widths = block_sizes.numpy(), block_table_strides.numpy()
    enabled, tables = slot_mapping_enabled.numpy(), block_table_ptrs.numpy()
    if end > first and (
        positions.min() < 0 or (enabled & (positions.max() // sizes >= widths)).any()
    ):
        return False
    requests = np.repeat(idx_mapping.numpy()[: grid[1] - 1], np.diff(starts))
    # A dummy owns no blocks.
    is_real, rows = requests >= 0, np.maximum(requests, 0)
    for group in range(grid[0]):
        slots = out[group]
        slots[end:max_num_tokens] = PAD_ID
        if end == first:
            continue
        if not enabled[group]:
            slots[first:end] = PAD_ID
            continue
        size = sizes[group]
        table = _at(tables[group], (int(rows.max()) + 1, int(widths[group])))
        found = table[rows, positions // size] * size + positions % size
        slots[first:end] = np.where(is_real, found, PAD_ID)
    return True


def _gather(
    grid: Sequence[int],
    requests: Any,
    tables: tuple[Any, Any],
    widths: Any,
    counts: Any,
    null: Callable[[int], Any],
) -> bool:
    """null: by group, how many of each request's first blocks are read as the null block."""
    if len(requests) and requests.min() < 0:
        return False
    count = len(requests)
    for group in range(grid[0]):
        width = int(widths[group])
        source, target = (table.numpy()[group] for table in tables)
        gathered = _at(target, (grid[1], width))
        gathered[count:] = 0
        if not count:
            continue
        at = np.arange(width)
        blocks = _at(source, (int(requests.max()) + 1, width))[requests]
        blocks = np.where(at < null(group), 0, blocks)
        np.copyto(gathered[:count], blocks, where=at < counts[group, requests][:, None])
    return True


def gather_block_tables(
    grid: Sequence[int],
    batch_idx_to_req_idx: Any,
    src_block_table_ptrs: Any,
    dst_block_table_ptrs: Any,
    block_table_strides: Any,
    num_blocks_ptr: Any,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
) -> bool:
    """vLLM 0.32's. Not where a row is of no request."""
    return _gather(
        grid,
        batch_idx_to_req_idx.numpy()[: min(num_reqs, grid[1])],
        (src_block_table_ptrs, dst_block_table_ptrs),
        block_table_strides,
        num_blocks_ptr.numpy(),
        lambda group: 0,
    )


def gather_readable_block_tables(
    grid: Sequence[int],
    batch_idx_to_req_idx: Any,
    src_block_table_ptrs: Any,
    dst_block_table_ptrs: Any,
    block_table_strides: Any,
    num_blocks_ptr: Any,
    num_blocks_stride: int,
    num_reqs: int,
    num_computed_tokens_ptr: Any,
    sliding_window_reach_ptr: Any,
    block_sizes_ptr: Any,
    MASK_SLIDING_WINDOW: bool,
    BLOCK_SIZE: int,
) -> bool:
    """vLLM 0.33's, which leaves out what no window reaches. Not where a row is of no request."""
    requests = batch_idx_to_req_idx.numpy()[: min(num_reqs, grid[1])]

    def null(group: int) -> Any:
        reach = int(sliding_window_reach_ptr[group]) if MASK_SLIDING_WINDOW else 0
        if reach <= 0:
            return 0
        beyond = np.maximum(num_computed_tokens_ptr.numpy()[requests] - reach, 0)
        return (beyond // int(block_sizes_ptr[group]))[:, None]

    return _gather(
        grid,
        requests,
        (src_block_table_ptrs, dst_block_table_ptrs),
        block_table_strides,
        num_blocks_ptr.numpy(),
        null,
    )


def apply_write(
    grid: Sequence[int],
    output_ptr: Any,
    output_stride: Any,
    write_indices_ptr: Any,
    write_starts_ptr: Any,
    write_contents_ptr: Any,
    write_cu_lens_ptr: Any,
    write_group_ids_ptr: Any,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> bool:
    """Not of types that numpy has not."""
    dtype = np.int32 if MULTI_GROUP else _TYPES.get(output_ptr.dtype)
    if dtype is None or write_contents_ptr.dtype not in _TYPES:
        return False
    size, contents = np.dtype(dtype).itemsize, write_contents_ptr.numpy()
    rows, starts = write_indices_ptr.tolist(), write_starts_ptr.tolist()
    ends = write_cu_lens_ptr.tolist()
    if MULTI_GROUP:
        groups = write_group_ids_ptr.tolist()
        bases, strides = output_ptr.tolist(), output_stride.tolist()
    else:
        groups, bases, strides = [0] * grid[0], [output_ptr.data_ptr()], [output_stride]
    begin = 0
    for row, start, end, group in zip(rows[: grid[0]], starts, ends, groups, strict=False):
        if end > begin:
            address = bases[group] + size * (row * strides[group] + start)
            _at(address, (end - begin,), dtype)[:] = contents[begin:end]
        begin = end
    return True


def prepare_prefill_inputs(
    grid: Sequence[int],
    input_ids_ptr: Any,
    next_prefill_tokens_ptr: Any,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: Any,
    query_start_loc_ptr: Any,
    all_token_ids_ptr: Any,
    all_token_ids_stride: int,
    prefill_lens_ptr: Any,
    num_computed_tokens_ptr: Any,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> bool:
    """Not where a row is of no request, nor of tokens beyond a request's row."""
    requests, starts = idx_mapping_ptr.numpy()[: grid[0]], query_start_loc_ptr.tolist()
    if len(requests) and requests.min() < 0:
        return False
    tokens, ids = all_token_ids_ptr.numpy(), input_ids_ptr.numpy()
    begins = num_computed_tokens_ptr.numpy()[requests].tolist()
    prompts = prefill_lens_ptr.numpy()[requests].tolist()
    rows = [row for row in range(grid[0]) if begins[row] < prompts[row]]
    ends = [begins[row] + starts[row + 1] - starts[row] for row in range(grid[0])]
    if any(ends[row] > tokens.shape[1] for row in rows):
        return False
    ahead = next_prefill_tokens_ptr.numpy()
    for row in rows:
        request, end = requests[row], ends[row]
        ids[starts[row] : starts[row + 1]] = tokens[request, begins[row] : end]
        following = tokens[request, end : min(end + num_lookahead, prompts[row])]
        ahead[:num_lookahead, request] = 0
        ahead[: len(following), request] = following
    return True


def prepare_pos_seq_lens(
    grid: Sequence[int],
    pos_ptr: Any,
    seq_lens_ptr: Any,
    idx_mapping_ptr: Any,
    query_start_loc_ptr: Any,
    num_computed_tokens_ptr: Any,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> bool:
    """Not where a row is of no request."""
    count = grid[0] - 1
    requests, starts = idx_mapping_ptr.numpy()[:count], query_start_loc_ptr.numpy()[: count + 1]
    if count and requests.min() < 0:
        return False
    lens, computed = np.diff(starts), num_computed_tokens_ptr.numpy()[requests]
    seq_lens = seq_lens_ptr.numpy()
    seq_lens[:count], seq_lens[count:max_num_reqs] = computed + lens, 0
    first, end = int(starts[0]), int(starts[-1])
    behind = np.repeat(computed - starts[:-1], lens)
    pos_ptr.numpy()[first:end] = np.arange(first, end) + behind
    return True


def get_num_sampled_and_rejected(
    grid: Sequence[int],
    num_sampled_ptr: Any,
    num_rejected_ptr: Any,
    seq_lens_ptr: Any,
    cu_num_logits_ptr: Any,
    idx_mapping_ptr: Any,
    prefill_len_ptr: Any,
) -> bool:
    """Not where a row is of no request."""
    count = grid[0]
    requests, sampled = idx_mapping_ptr.numpy()[:count], num_sampled_ptr.numpy()[:count]
    if count and requests.min() < 0:
        return False
    is_chunk = seq_lens_ptr.numpy()[:count] < prefill_len_ptr.numpy()[requests]
    sampled[is_chunk] = 0
    rejected = np.diff(cu_num_logits_ptr.numpy()[: count + 1]) - sampled
    num_rejected_ptr.numpy()[:count] = np.where(is_chunk, 0, rejected)
    return True


def combine_sampled_and_draft_tokens(
    grid: Sequence[int],
    input_ids_ptr: Any,
    idx_mapping_ptr: Any,
    last_sampled_tokens_ptr: Any,
    query_start_loc_ptr: Any,
    seq_lens_ptr: Any,
    prefill_len_ptr: Any,
    draft_tokens_ptr: Any,
    draft_tokens_stride: int,
    cu_num_logits_ptr: Any,
    logits_indices_ptr: Any,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> bool:
    """Not where a row is of no request."""
    count = grid[0]
    rows = idx_mapping_ptr.numpy()[:count]
    if count and rows.min() < 0:
        return False
    ends, edges = query_start_loc_ptr.tolist()[1:], cu_num_logits_ptr.tolist()
    lens, prompts = seq_lens_ptr.tolist(), prefill_len_ptr.numpy()[rows].tolist()
    last, drafts = last_sampled_tokens_ptr.numpy().reshape(-1), draft_tokens_ptr.numpy()
    ids, indices = input_ids_ptr.numpy(), logits_indices_ptr.numpy()
    for row, request in enumerate(rows.tolist()):
        logits, end = edges[row + 1] - edges[row], ends[row]
        begin = end - logits
        indices[edges[row] : edges[row + 1]] = np.arange(begin, end)
        if lens[row] <= prompts[row]:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and lens[row] - logits >= prompts[row]:
            ids[begin] = last[request]
        if (drafted := logits - NUM_NEW_SAMPLED_TOKENS) > 0:
            ids[end - drafted : end] = drafts[request, :drafted]
    return True


def post_update(
    grid: Sequence[int],
    idx_mapping_ptr: Any,
    num_computed_tokens_ptr: Any,
    last_sampled_tokens_ptr: Any,
    output_bin_counts_ptr: Any,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: Any,
    sampled_tokens_stride: int,
    num_sampled_ptr: Any,
    num_rejected_ptr: Any,
    query_start_loc_ptr: Any,
    all_token_ids_ptr: Any,
    all_token_ids_stride: int,
    total_len_ptr: Any,
) -> bool:
    """vLLM 0.32's. Not of tokens beyond a request's row."""
    counts, rejected = num_sampled_ptr.tolist(), num_rejected_ptr.tolist()
    starts = [0] * (grid[0] + 1) if query_start_loc_ptr is None else query_start_loc_ptr.tolist()
    rows = [
        (row, request)
        for row, request in enumerate(idx_mapping_ptr.tolist()[: grid[0]])
        if request >= 0
    ]
    totals, computed = total_len_ptr.numpy(), num_computed_tokens_ptr.numpy()
    ids, sampled = all_token_ids_ptr.numpy(), sampled_tokens_ptr.numpy()
    if any(totals[request] + counts[row] > ids.shape[1] for row, request in rows):
        return False
    last = last_sampled_tokens_ptr.numpy().reshape(-1)
    for row, request in rows:
        if (count := counts[row]) > 0:
            tokens, total = sampled[row, :count], totals[request]
            last[request] = tokens[-1]
            ids[request, total : total + count] = tokens
            totals[request] += count
            if output_bin_counts_ptr is not None:
                np.add.at(output_bin_counts_ptr.numpy()[request], tokens, 1)
        computed[request] += starts[row + 1] - starts[row] - rejected[row]
    return True


def post_update_and_drafts(
    grid: Sequence[int],
    idx_mapping_ptr: Any,
    num_computed_tokens_ptr: Any,
    last_sampled_tokens_ptr: Any,
    output_bin_counts_ptr: Any,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: Any,
    sampled_tokens_stride: int,
    num_sampled_ptr: Any,
    num_rejected_ptr: Any,
    query_start_loc_ptr: Any,
    all_token_ids_ptr: Any,
    all_token_ids_stride: int,
    total_len_ptr: Any,
    draft_tokens_ptr: Any,
    draft_tokens_out_ptr: Any,
    num_draft_tokens: int,
) -> bool:
    """vLLM 0.33's. Not where it keeps drafts, nor of tokens beyond a request's row."""
    return draft_tokens_ptr is None and post_update(
        grid,
        idx_mapping_ptr,
        num_computed_tokens_ptr,
        last_sampled_tokens_ptr,
        output_bin_counts_ptr,
        output_bin_counts_stride,
        sampled_tokens_ptr,
        sampled_tokens_stride,
        num_sampled_ptr,
        num_rejected_ptr,
        query_start_loc_ptr,
        all_token_ids_ptr,
        all_token_ids_stride,
        total_len_ptr,
    )
