"""The copies that requests owe each other where they share blocks and will write over them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

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
