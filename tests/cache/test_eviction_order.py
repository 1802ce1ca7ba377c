"""What the prefix cache loses first: what nobody could find any more."""

from typing import Any

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from vllm_kvx.cache.dropped_blocks import in_turn_to_free
from vllm_kvx.cache.kv_cache_specs import FirstStageAttentionSpec
from vllm_kvx.cache.managers import FirstStageKVCacheManager
from vllm_kvx.cache.request_kv import RequestKV
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.storage import storage_of

BLOCK = 4


def managers(count: int, pool: BlockPool) -> list[FirstStageKVCacheManager]:
    """Groups of one server."""
    sizes: Any = dict(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    common: Any = dict(block_pool=pool, enable_caching=True, scheduler_block_size=BLOCK)
    found = [
        FirstStageKVCacheManager(
            FirstStageAttentionSpec(**sizes), kv_cache_group_id=group, **common
        )
        for group in range(count)
    ]
    for manager in found:
        manager.siblings = found
    return found


def grow(manager: FirstStageKVCacheManager, num_tokens: int) -> None:
    manager.get_num_blocks_to_allocate("a", num_tokens, [], 0, 0, num_tokens)
    manager.allocate_new_blocks("a", num_tokens, num_tokens)


def publish(manager: FirstStageKVCacheManager, pool: BlockPool) -> list[BlockHash]:
    """The request's blocks so far are in the cache, under these names."""
    names = []
    for place, block in enumerate(manager.req_to_blocks["a"]):
        names.append(BlockHash(f"{place}".encode()))
        key = make_block_hash_with_group_id(names[-1], manager.kv_cache_group_id)
        pool._insert_block_hash(key, block, num_tokens=BLOCK)
    return names


def test_groups_lose_the_ends_of_a_prompt_first() -> None:
    """A hit needs a block in every group: of 30 blocks 10 are lost, and of 10 places 4."""
    pool = BlockPool(31, enable_caching=True, hash_block_size=BLOCK)
    groups = managers(3, pool)
    for manager in groups:
        policy = parse_policy("speed-4")
        storage = storage_of(policy, 40, 0, BLOCK, 8)
        manager.add_request("a", RequestKV(storage, policy, reads=True, publishes=None))
        grow(manager, 40)
        names = publish(manager, pool)
    for manager in groups:
        manager.free("a")
    assert pool.get_num_free_blocks() == 30
    pool.get_new_blocks(10)
    held = [bool(pool.get_cached_block(name, [0, 1, 2])) for name in names]
    assert held == [True] * 6 + [False] * 4


def test_what_is_written_over_takes_along_what_stands_behind_it() -> None:
    """A compacted prompt's later blocks would stay in the cache longest, and nobody finds them."""
    pool = BlockPool(31, enable_caching=True, hash_block_size=BLOCK)
    (manager,) = managers(1, pool)
    policy = parse_policy("snapkv:kv_rate=0.4,kv_floor=0,window=3")
    kv = RequestKV(storage_of(policy, 38, 0, BLOCK, 8), policy, reads=True, publishes=None)
    manager.add_request("a", kv)
    grow(manager, 32)
    names = publish(manager, pool)
    assert not kv.moves_out and len(names) == 8
    # Another request reads the first two.
    pool.touch(manager.req_to_blocks["a"][:2])
    grow(manager, 38)
    pool.free_blocks(in_turn_to_free(pool, [manager.shrink("a", 38)], None))
    cached = [bool(pool.get_cached_block(name, [0])) for name in names]
    assert cached == [True] * 2 + [False] * 6
