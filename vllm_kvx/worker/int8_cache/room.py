"""The memory that attention over 8-bit entries takes: for prompts for a moment, else always."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_kvx.ops.retrieval.all_entries import AllEntries
from vllm_kvx.ops.retrieval.retrieve import Scratch
from vllm_kvx.worker.int8_cache.pieces import SHORT, is_cut, scratch_entries
from vllm_kvx.worker.int8_cache.prefill import scratch_bytes


def short_rows(device: str, dtype: torch.dtype, max_rows: int) -> int:
    """The most rows of a request in a step that is read as it is stored; all others are undone.

    device: its type. dtype: the model's. max_rows: of a step.
    """
    if device == "cpu":
        return 0
    # FlashAttention does not take float32, and vLLM's kernel reads prompts, too.
    return max_rows if dtype == torch.float32 else SHORT


def room_of(layers: Sequence[Any], dtype: torch.dtype, config: VllmConfig) -> int:
    """Bytes that one of vLLM's attention `layers` takes, at most; 0 where none undoes entries.

    layers: with a cache of our own backend, and others. dtype: the model's.
    """
    ours = [layer for layer in layers if hasattr(layer.impl, "sidecar_bytes")]
    if not ours:
        return 0
    layer, rows = ours[0], config.scheduler_config.max_num_batched_tokens
    if short_rows(config.device_config.device_type, dtype, rows) >= rows:
        return 0
    longest = config.model_config.max_model_len
    entries = scratch_entries(longest, rows, config.cache_config.block_size)
    return scratch_bytes(
        entries,
        min(rows, longest),
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        dtype.itemsize,
        cuts=is_cut(longest),
    )


def read_all(layers: Sequence[Any], scratch: Scratch, max_len: int) -> list[torch.Tensor]:
    """Has layers with such entries read all of them by the operator of retrieval.

    layers: vLLM's attention layers. scratch: that of retrieval. max_len: of a request.
    Returns: what is written once, and has to outlive vLLM's sleep.
    """
    ours = [layer for layer in layers if hasattr(layer.impl, "sidecar_bytes")]
    if not ours:
        return []
    every = AllEntries.of(scratch, max_len)
    for layer in ours:
        layer.impl.all_entries = every
    return every.kept
