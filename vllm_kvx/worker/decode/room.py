"""Sizes that retrieval goes by; among them room for scores, taken before vLLM sizes the pool."""

from collections.abc import Sequence
from statistics import mode

import numpy as np
import torch

from vllm_kvx.ops.retrieval.rows import room_of
from vllm_kvx.policy.cache_dtype import INT8
from vllm_kvx.policy.storage import IntArray
from vllm_kvx.worker.decode.step import HookedLayer

# The share of the device's memory that scores get. It holds several scores for every entry of the
# pool, since rows that share a prompt have scores of their own.
SCORE_SHARE = 1 / 1024
# Scores never get more than this.
MAX_SCORE_BYTES = 256 << 20


def score_bytes(device: torch.device) -> int:
    """Memory for scores on `device`."""
    if device.type == "cpu":
        return MAX_SCORE_BYTES
    total = torch.cuda.get_device_properties(device).total_memory
    return min(int(total * SCORE_SHARE), MAX_SCORE_BYTES)


def capacity_of(
    max_num_reqs: int,
    max_model_len: int,
    unit: int,
    kv_heads: int,
    num_bytes: int,
    drafts: int = 0,
    at_once: bool = False,
) -> int:
    """Units that scores have room for: all there can be, or as many as fit into `num_bytes`.

    Two rows of the longest length fit in any case. A multiple of four, as ``room_of``.

    Args:
        drafts: most tokens that are drafted for a request, each of which has a row of its own.
            Twice the bytes are for them: the pool's entries have several scores without.
        at_once: whatever fits without drafts fits with them.
    """
    longest = int(room_of(np.array([max_model_len]), unit)[0])
    rows, share = 1 + drafts, 2 if drafts else 1
    if at_once:
        rows, share = 1, 1
    tokens = share * num_bytes // (4 * kv_heads)
    capacity = min(rows * max_num_reqs * longest, max(2 * longest, tokens // unit // 4 * 4))
    return capacity * (1 + drafts) if at_once else capacity


def entry_bytes(layers: Sequence[HookedLayer]) -> int:
    """Bytes of one KV head's key and value in most layers: some may skip a quantized cache.

    Entries of 8 bits with scales count as 16: layers take about as long, whether they read all of
    them or some (docs/notebook/int8-cache.md).
    """
    sizes = [
        2 if each.layer.kv_cache_dtype == INT8 else each.layer.kv_cache_torch_dtype.itemsize
        for each in layers
    ]
    return int(2 * layers[0].layer.impl.head_size * mode(sizes))


def fits(lens: IntArray, unit: int, capacity: int) -> bool:
    """Whether the scores of (S, R) entries have room at once, stage by stage."""
    if surely_fits(lens, unit, capacity):
        return True
    return bool((room_of(lens, unit).sum(axis=1) <= capacity).all())


def surely_fits(lens: IntArray, unit: int, capacity: int) -> bool:
    """Whether all scores of entries have room, which is true of most batches: it takes less time.

    lens: of any shape. A row takes a few units more than its entries.
    """
    return int(lens.sum()) // unit + 5 * lens.size <= capacity
