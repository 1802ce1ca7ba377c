"""Blocks of layers that slide above a cut: as many as stored entries need, none behind a window."""

from typing import Any

import pytest
import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool

from vllm_kvx.cache.kv_cache_specs import SlidingStageSpec
from vllm_kvx.cache.request_kv import RequestKV
from vllm_kvx.cache.sliding_stage_manager import SlidingStageKVCacheManager
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.storage import storage_of

BLOCK, POOL, WINDOW, CUT, LAYERS = 4, 200, 10, 4, 8
PROMPT = 50
# Blocks of a window and of a step, which need not begin with a block.
MOST = cdiv(WINDOW - 1 + 16, BLOCK) + 1


def manager_of(pool: BlockPool) -> SlidingStageKVCacheManager:
    sizes: Any = dict(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    spec = SlidingStageSpec(**sizes, sliding_window=WINDOW, stage=2, start_layer=CUT)
    return SlidingStageKVCacheManager(
        spec,
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
        max_admission_blocks_per_request=MOST,
    )


@pytest.mark.parametrize("policy", ["full", "speed-4", "speed-4:anchors=30,tail=5", "speed-6"])
def test_blocks_of_a_request(policy: str) -> None:
    """Step by step: enough for what the step stores, none that no window reaches, none left."""
    pool, parsed = BlockPool(POOL, enable_caching=True, hash_block_size=BLOCK), parse_policy(policy)
    free = pool.get_num_free_blocks()
    manager = manager_of(pool)
    storage = storage_of(parsed, PROMPT, CUT, BLOCK, LAYERS, slides=True)
    manager.add_request("a", RequestKV(storage, parsed, publishes=0))
    turn = 0 if storage.turn is None else storage.turn
    ends = [*range(16, turn, 16), turn, *range(turn + 16, PROMPT, 16), *range(PROMPT, PROMPT + 90)]
    computed = 0
    for end in ends:
        manager.remove_skipped_blocks("a", computed)
        needed = manager.get_num_blocks_to_allocate("a", end, (), computed, 0, end)
        assert len(manager.allocate_new_blocks("a", end, end)) == needed
        held = manager.req_to_blocks["a"]
        # In these steps' windows.
        before = computed if storage.turn is None or computed > turn else turn
        first = max(storage.stored_len(before) - WINDOW + 1, 0) if before != turn or not turn else 0
        stored = storage.stored_len(end)
        assert len(held) >= cdiv(stored, BLOCK)
        assert not any(block.is_null for block in held[first // BLOCK :])
        assert all(block.is_null for block in held[: first // BLOCK])
        assert sum(not block.is_null for block in held) <= max(MOST, cdiv(30, BLOCK))
        computed = end
    manager.free("a")
    assert pool.get_num_free_blocks() == free


def test_a_long_answer_that_begins_anew_asks_for_a_window_alone() -> None:
    pool, parsed = BlockPool(POOL, enable_caching=True, hash_block_size=BLOCK), None
    manager, parsed = manager_of(pool), parse_policy("speed-4")
    storage = storage_of(parsed, PROMPT, CUT, BLOCK, LAYERS, slides=True)
    manager.add_request("a", RequestKV(storage, parsed, publishes=0))
    asked = [
        manager.get_num_blocks_to_allocate("a", 700, (), 0, 0, 700, apply_admission_cap=cap)
        for cap in (False, True)
    ]
    assert asked == [cdiv(1 + 650, BLOCK), MOST]
