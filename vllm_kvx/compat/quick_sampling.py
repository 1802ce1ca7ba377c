"""Kernels that sample and score tokens, for all rows at once; see ``quick_kernels``.

Parameters are those of vLLM's kernels, whose code says what they hold.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def topk_log_softmax(
    grid: Sequence[int],
    output_ptr: Any,
    logits_ptr: Any,
    logits_stride: int,
    topk_ids_ptr: Any,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> bool:
    """Not of logits without a largest one."""
    logits = _rows(logits_ptr, grid[0])
    if logits is None or not np.isfinite(largest := logits.max(axis=1, keepdims=True)).all():
        return False
    # Summed by blocks, as the kernel does.
    exponents = _blocks(np.exp(logits - largest), BLOCK_SIZE, 0.0).sum(axis=2)
    total = np.zeros((grid[0], 1), np.float32)
    for block in range(exponents.shape[1]):
        total += exponents[:, block : block + 1]
    chosen = np.take_along_axis(logits, topk_ids_ptr.numpy()[: grid[0], :topk], axis=1)
    output_ptr.numpy()[: grid[0]] = chosen - largest - np.log(total)
    return True


def ranks(
    grid: Sequence[int],
    output_ptr: Any,
    logits_ptr: Any,
    logits_stride: int,
    token_ids_ptr: Any,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> bool:
    """Not of logits that numpy has no type for."""
    logits = _rows(logits_ptr, grid[0])
    if logits is None:
        return False
    chosen = np.take_along_axis(logits, token_ids_ptr.numpy()[: grid[0], None], axis=1)
    # What lies behind the vocabulary in the last block counts as -inf.
    ranks = (_blocks(logits, BLOCK_SIZE, -np.inf) >= chosen[..., None]).sum(axis=(1, 2))
    output_ptr.numpy()[: grid[0]] = ranks
    return True


def gumbel_sample(
    grid: Sequence[int],
    local_argmax_ptr: Any,
    local_argmax_stride: int,
    local_max_ptr: Any,
    local_max_stride: int,
    logits_cache_ptr: Any,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: Any,
    logits_cache_source_ptr: Any,
    logits_cache_source_stride: int,
    logits_ptr: Any,
    logits_stride: int,
    expanded_idx_mapping_ptr: Any,
    seeds_ptr: Any,
    pos_ptr: Any,
    temp_ptr: Any,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> bool:
    """Greedy rows alone, whose logits nobody wants to have kept."""
    logits, requests = _rows(logits_ptr, grid[0]), expanded_idx_mapping_ptr.numpy()[: grid[0]]
    if logits is None or logits_cache_ptr is not None or np.isnan(logits).any():
        return False
    if temp_ptr.numpy()[requests[requests >= 0]].any():
        return False
    blocks = _blocks(logits, BLOCK_SIZE, -np.inf)
    best = blocks.argmax(axis=2)
    local_argmax_ptr.numpy()[: grid[0]] = best + BLOCK_SIZE * np.arange(grid[1])
    local_max_ptr.numpy()[: grid[0]] = np.take_along_axis(blocks, best[..., None], 2)[..., 0]
    return True


def _rows(logits: Any, count: int) -> Any:
    """Logits of `count` rows, (count, vocabulary) float32; None of another type or layout."""
    if logits.dtype is not torch.float32 or logits.stride(-1) != 1:
        return None
    return logits.numpy()[:count]


def _blocks(values: Any, size: int, other: float) -> Any:
    """Rows in blocks, (rows, blocks, size), with `other` behind the last value."""
    rows, width = values.shape
    count = -(-width // size)
    padded = np.full((rows, count * size), other, values.dtype)
    padded[:, :width] = values
    return padded.reshape(rows, count, size)
