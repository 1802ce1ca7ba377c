"""Slot mappings and stored lengths of KV stages that hold only part of a prompt.

vLLM computes one slot per token and one length per request, both from token positions. A
stage with a gap (``policy.axes.Gap``) stores its entries contiguously without the gap, so its
slots and lengths are rewritten here, on device, in place of vLLM's.
"""

import ctypes

import numpy as np
import torch
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.buffer_utils import _load_ptr


def map_slots(
    group_ids: torch.Tensor,
    group_stages: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    gap_starts: torch.Tensor,
    gap_sizes: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mappings: torch.Tensor,
    stored_lens: torch.Tensor,
    num_reqs_padded: int,
    on_host: bool | None = None,
) -> None:
    """Rewrites ``slot_mappings`` of the given KV groups and fills ``stored_lens``.

    Args:
        group_ids: (U,) int32, KV groups to rewrite.
        group_stages: (U,) int32, row of ``gap_starts`` that each of them follows.
        idx_mapping: (R,) int64, request-state index of each request in the batch.
        query_start_loc: (R + 1,) int32.
        positions: (T,) int64, token positions.
        seq_lens: (R,) int32, logical lengths including this step's tokens.
        gap_starts, gap_sizes: (S, max_num_reqs) int32, by KV stage and request state.
        block_table_ptrs, block_table_strides, block_sizes: (G,), vLLM's block table layout.
        slot_mappings: (G, max_num_tokens) int64, overwritten; the gap gets ``PAD_SLOT_ID``.
        stored_lens: (S, max_num_reqs) int32, overwritten in batch order; padding gets 0.
        num_reqs_padded: rows of ``stored_lens`` to fill.
        on_host: whether the host does it, and not the kernel; if not given, where all is on CPU:
            interpreted, the kernel takes longer than a small model's step.
    """
    if slot_mappings.device.type == "cpu" if on_host is None else on_host:
        _map_on_host(
            group_ids.tolist(),
            group_stages.tolist(),
            idx_mapping.numpy(),
            query_start_loc.numpy(),
            positions.numpy(),
            seq_lens.numpy(),
            gap_starts.numpy(),
            gap_sizes.numpy(),
            block_table_ptrs.tolist(),
            block_table_strides.tolist(),
            block_sizes.tolist(),
            slot_mappings.numpy(),
            stored_lens.numpy(),
            num_reqs_padded,
        )
        return
    _map_slots_kernel[(group_ids.shape[0], num_reqs_padded)](
        group_ids,
        group_stages,
        idx_mapping,
        query_start_loc,
        positions,
        seq_lens,
        gap_starts,
        gap_sizes,
        gap_starts.stride(0),
        block_table_ptrs,
        block_table_strides,
        block_sizes,
        slot_mappings,
        slot_mappings.stride(0),
        stored_lens,
        stored_lens.stride(0),
        idx_mapping.shape[0],
        PAD_ID=PAD_SLOT_ID,
        BLOCK=1024,
    )


@triton.jit(do_not_specialize=["num_reqs"])
def _map_slots_kernel(
    group_ids,
    group_stages,
    idx_mapping,
    query_start_loc,
    positions,
    seq_lens,
    gap_starts,
    gap_sizes,
    gap_stride,
    block_table_ptrs,
    block_table_strides,
    block_sizes,
    slot_mappings,
    slot_mappings_stride,
    stored_lens,
    stored_lens_stride,
    num_reqs,
    PAD_ID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group_index = tl.program_id(0)
    batch_index = tl.program_id(1)
    group_id = tl.load(group_ids + group_index)
    stage = tl.load(group_stages + group_index)
    stored_len_ptr = stored_lens + stage * stored_lens_stride + batch_index
    if batch_index >= num_reqs:
        tl.store(stored_len_ptr, 0)
        return

    request = tl.load(idx_mapping + batch_index)
    gap_start = tl.load(gap_starts + stage * gap_stride + request)
    gap_size = tl.load(gap_sizes + stage * gap_stride + request)
    gap_end = gap_start + gap_size

    # Groups of one stage store the same value, so the race between them is harmless.
    length = tl.load(seq_lens + batch_index)
    in_gap = tl.minimum(tl.maximum(length - gap_start, 0), gap_size)
    tl.store(stored_len_ptr, length - in_gap)

    table = _load_ptr(block_table_ptrs + group_id, tl.int32)
    table += request * tl.load(block_table_strides + group_id)
    block_size = tl.load(block_sizes + group_id)
    slots = slot_mappings + group_id.to(tl.int64) * slot_mappings_stride
    begin = tl.load(query_start_loc + batch_index)
    end = tl.load(query_start_loc + batch_index + 1)
    for i in range(begin, end, BLOCK):
        token = i + tl.arange(0, BLOCK)
        mask = token < end
        position = tl.load(positions + token, mask=mask, other=0)
        kept = (position < gap_start) | (position >= gap_end)
        index = tl.where(position < gap_start, position, position - gap_size)
        block = tl.load(table + index // block_size, mask=mask & kept, other=0)
        slot = block.to(tl.int64) * block_size + index % block_size
        tl.store(slots + token, tl.where(kept, slot, PAD_ID), mask=mask)


def _map_on_host(
    group_ids: list[int],
    group_stages: list[int],
    requests: np.ndarray,
    query_start_loc: np.ndarray,
    positions: np.ndarray,
    seq_lens: np.ndarray,
    gap_starts: np.ndarray,
    gap_sizes: np.ndarray,
    table_addresses: list[int],
    table_strides: list[int],
    block_sizes: list[int],
    slot_mappings: np.ndarray,
    stored_lens: np.ndarray,
    num_reqs_padded: int,
) -> None:
    """`map_slots` on the host, over all tokens at once; arguments as there."""
    num_reqs = len(requests)
    starts = query_start_loc[: num_reqs + 1]
    tokens = slice(starts[0], starts[-1])
    owner, at, lens = np.repeat(requests, np.diff(starts)), positions[tokens], seq_lens[:num_reqs]
    for group, stage in zip(group_ids, group_stages, strict=True):
        first, size = gap_starts[stage], gap_sizes[stage]
        in_gap = np.clip(lens - first[requests], 0, size[requests])
        stored_lens[stage, :num_reqs] = lens - in_gap
        stored_lens[stage, num_reqs:num_reqs_padded] = 0
        kept = (at < first[owner]) | (at >= first[owner] + size[owner])
        index = np.where(kept, at - np.where(at < first[owner], 0, size[owner]), 0)
        rows, width = int(requests.max(initial=0)) + 1, table_strides[group]
        address = ctypes.cast(table_addresses[group], ctypes.POINTER(ctypes.c_int32))
        table = np.ctypeslib.as_array(address, (rows, width))
        block_size = block_sizes[group]
        slots = table[owner, index // block_size].astype(np.int64) * block_size + index % block_size
        slot_mappings[group, tokens] = np.where(kept, slots, PAD_SLOT_ID)


def map_slots_reference(
    positions: torch.Tensor,
    seq_len: int,
    gap_start: int,
    gap_size: int,
    block_table: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, int]:
    """Maps one request's positions to slots of one KV group, in plain torch.

    positions: (T,) integers. block_table: (blocks,) integers. gap_start, gap_size: the positions
        that are not stored.
    Returns: (T,) int64 slots, PAD_SLOT_ID in the gap, and the entries stored of `seq_len` tokens.
    """
    gap_end = gap_start + gap_size
    kept = (positions < gap_start) | (positions >= gap_end)
    index = torch.where(positions < gap_start, positions, positions - gap_size)
    index = torch.where(kept, index, torch.zeros_like(index))
    slots = block_table[index // block_size].long() * block_size + index % block_size
    stored_len = seq_len - min(max(seq_len - gap_start, 0), gap_size)
    return torch.where(kept, slots, torch.full_like(slots, PAD_SLOT_ID)), stored_len
