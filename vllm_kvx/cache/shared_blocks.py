"""What requests that share blocks owe each other: copies to write in, and the order of freeing."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock


def copies_to_come(
    writers: Sequence[Sequence[KVCacheBlock]],
    leaving: Iterable[Sequence[KVCacheBlock]],
    joined: Sequence[KVCacheBlock],
) -> int:
    """Blocks that prompts will take for copies, when they are compacted in place one by one.

    A block that several hold is copied by each that would write over it, but not by the last one
    that holds it. So the number is never above what sharing has saved, which is one block for
    every holder beyond the first.

    writers: of each prompt that is to be compacted, the blocks that it writes over. leaving: blocks
        of requests that will give them back in the next step; a block of a prefix has the same
        place in all lists. joined: what one more request is about to hold.
    """
    longest = max(map(len, writers), default=0)
    gone = Counter(block.block_id for blocks in leaving for block in blocks[:longest])
    coming = {block.block_id for block in joined[:longest]}
    wanted, others = Counter[int](), dict[int, int]()
    for block in chain.from_iterable(writers):
        name = block.block_id
        others[name] = block.ref_cnt + (name in coming) - gone[name] - 1
        wanted[name] += 1
    return sum(min(count, max(others[name], 0)) for name, count in wanted.items())


def free_end_first(pool: BlockPool, groups: Sequence[Mapping[int, KVCacheBlock]]) -> None:
    """Frees blocks of one request, by KV group and place, so that the cache loses its end first.

    A prefix that lost a block in one group is lost in all.
    """
    by_place = [(place, group) for group, blocks in enumerate(groups) for place in blocks]
    pool.free_blocks(groups[group][place] for place, group in sorted(by_place, reverse=True))
