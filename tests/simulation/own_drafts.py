"""Tokens that the model drafts for itself, written behind those that count.

The cache is the simulated one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulation.cache import Cache, Mismatch
from simulation.live import Live

# What no token's entry is.
DRAFTED = -77


def write_drafts(
    live: Sequence[Live],
    ends: Sequence[int],
    given: Sequence[int],
    count: int,
    state: Any,
    tables: Any,
    cache: Cache,
) -> int:
    """Writes as many entries as may be drafted for each request that has a token to go on from.

    In every layer, with the groups of its index that the worker plans. Who reads one of them before
    it is computed finds what nobody has made. Returns how many are written.

    live: of the step, past it. ends: tokens of each that the step computed, and given: how many of
        them were drafted, of which some may be gone.

    Raises:
        Mismatch: there is no room for one.
    """
    rows = [i for i, one in enumerate(live) if one.done == len(one.tokens) - 1]
    requests = np.array([live[i].index for i in rows], dtype=np.int64)
    done = np.array([live[i].done for i in rows], dtype=np.int64)
    most = np.array([ends[i] for i in rows], dtype=np.int64)
    least = most - np.array([given[i] for i in rows], dtype=np.int64)
    limit, sidecars = state.max_model_len, state.retrieval.sidecars
    for number in range(count if rows else 0):
        seen = np.minimum(done + number + 1, limit)
        bounds = (np.minimum(bound + number + 1, limit) for bound in (least, most))
        sidecars.plan_drafts(requests, *bounds)
        for hook in state.hooks.layers:
            table = tables.block_tables[hook.group].gpu.numpy()[requests].astype(np.int64)
            held = tables.num_blocks.np[hook.group, requests]
            if (held * cache.block_size < seen).any():
                raise Mismatch(f"no room for drafts of {requests}: {held} blocks for {seen}")
            places = seen - 1
            slots = table[np.arange(len(rows)), places // cache.block_size] * cache.block_size
            cache.write(hook.index, slots + places % cache.block_size, np.full(len(rows), DRAFTED))
            sidecars.write(hook.place)
        sidecars.forget()
    return count * len(rows)
