"""Copies that are owed for blocks which several requests hold, against all orders of compaction."""

import itertools
import random

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvx.cache.dropped_blocks import in_turn_to_free
from vllm_kvx.cache.shared_blocks import copies_to_come


def most_copies(writers: list[list[KVCacheBlock]], held: dict[int, int]) -> int:
    """What compactions take in the worst order: each copies what others hold, and lets it go."""
    worst = 0
    for order in itertools.permutations(writers):
        holders, copies = dict(held), 0
        for blocks in order:
            for block in blocks:
                copies += holders[block.block_id] > 1
                holders[block.block_id] -= 1
        worst = max(worst, copies)
    return worst


@pytest.mark.parametrize("seed", range(40))
def test_as_many_as_the_worst_order_takes(seed: int) -> None:
    rng = random.Random(seed)
    tree = [[KVCacheBlock(4 * family + place) for place in range(4)] for family in range(2)]

    def prefix() -> list[KVCacheBlock]:
        return rng.choice(tree)[: rng.randrange(5)]

    writers, readers, leaving = ([prefix() for _ in range(rng.randrange(4))] for _ in range(3))
    for block in itertools.chain(*writers, *readers, *leaving):
        block.ref_cnt += 1
    joined = prefix()
    begins = [joined] if rng.random() < 0.5 else []
    # Of those who remain.
    held = {block.block_id: 0 for block in itertools.chain(*tree)}
    for block in itertools.chain(*writers, *readers, joined):
        held[block.block_id] += 1
    owed = copies_to_come([*writers, *begins], leaving, joined)
    assert owed == most_copies([*writers, *begins], held)
    # No more than sharing has saved.
    assert owed <= sum(max(count - 1, 0) for count in held.values())


def test_ends_go_first_in_every_group() -> None:
    pool = BlockPool(11, enable_caching=False, hash_block_size=4)
    taken = pool.get_new_blocks(10)
    groups = [dict(enumerate(taken[:6])), {2: taken[6], 3: taken[7], 5: taken[8], 9: taken[9]}]
    pool.free_blocks(in_turn_to_free(pool, groups, None))
    first = [block.block_id for block in pool.get_new_blocks(10)]
    places = {block.block_id: place for group in groups for place, block in group.items()}
    assert [places[number] for number in first] == sorted(places.values(), reverse=True)
