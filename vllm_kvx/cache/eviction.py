"""Which prompts stay in the prefix cache where it cannot hold all that come back.

vLLM evicts what was not used for longest. Where sessions take turns and need a little more than
the pool, that is always what is asked for next, and soon nobody finds anything. So a prompt that
comes back too late, when a part of it is gone and everything that could go in its place was used
since, may compute that part without keeping it: else it pushes out what is asked for sooner. This
is the rule of LIRS (Jiang and Zhang, SIGMETRICS 2002): a block's reuse distance against the recency
of the coldest one that is kept. Sessions that end without a word mislead it, for their blocks look
as if they were to be used; so it is followed as long as it proves right: of a part that came too
late and the coldest block that was there, which is asked for first? That is Belady's question,
answered later. Nothing changes where nothing is lost.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)

# Blocks of the first group tell for all, as do those of states, which count as its own: a prefix
# that lost a block in one is lost in all.
_GROUP = 0
_SUFFIX = make_block_hash_with_group_id(BlockHash(b""), _GROUP)
# Of the last answers that count, by how many the balance may lean to a side; and questions open.
_MOST, _OPEN = 8, 256


@dataclass(frozen=True)
class Rivals:
    """What a prompt asked for too late, and the coldest block that would go for it."""

    lost: BlockHash
    coldest: BlockHash


class Recency:
    """When blocks of a pool's prefix cache were used last, those that it has lost among them.

    Time is counted in prompts that began. It remembers as many as the pool has blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool, self._now = pool, 0
        # By key, in the order of use.
        self._used: dict[bytes, int] = {}
        # By the coldest one's hash, in the order in which they met.
        self._open: dict[BlockHash, BlockHash] = {}
        self._balance = 0
        free, reset = pool.free_blocks, pool.reset_prefix_cache

        def free_blocks(ordered_blocks: Iterable[KVCacheBlock]) -> None:
            blocks = list(ordered_blocks)
            self._note(blocks)
            free(blocks)

        def reset_prefix_cache() -> bool:
            is_done = reset()
            if is_done:
                self._used.clear()
                self._open.clear()
            return is_done

        pool.free_blocks = free_blocks  # type: ignore[method-assign]
        pool.reset_prefix_cache = reset_prefix_cache  # type: ignore[method-assign]

    @property
    def is_strict(self) -> bool:
        """Whether what comes too late is not to be kept, as far as answers say."""
        return self._balance > 0

    def begin_prompt(self, asked: Iterable[BlockHash], rivals: Rivals | None) -> None:
        """A prompt begins. asked: its blocks' hashes, whether cached or not; rivals: its own."""
        self._now += 1
        if self._open:
            hashes = set(asked)
            for coldest, lost in list(self._open.items()):
                if coldest in hashes or lost in hashes:
                    del self._open[coldest]
                    found = self._balance + (1 if coldest in hashes else -1)
                    self._balance = max(-_MOST, min(found, _MOST))
        if rivals is not None:
            self._open.setdefault(rivals.coldest, rivals.lost)
            if len(self._open) > _OPEN:
                del self._open[next(iter(self._open))]

    def _note(self, blocks: Iterable[KVCacheBlock]) -> None:
        used, now = self._used, self._now
        for block in blocks:
            key = block.block_hash
            if key is not None and key.endswith(_SUFFIX):
                used.pop(key, None)
                used[key] = now
        while len(used) > self._pool.num_gpu_blocks:
            del used[next(iter(used))]

    def too_late(self, block_hash: BlockHash, found: Iterable[KVCacheBlock]) -> Rivals | None:
        """Whether the first block of a prompt that is not in the cache was there too long ago.

        It was used before all those that could be evicted for it.

        found: blocks before it, which the same request is about to use.
        """
        before = self._used.get(make_block_hash_with_group_id(block_hash, _GROUP))
        if before is None:
            return None
        own = {block.block_id for block in found}
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            key = block.block_hash
            if key is not None and block.block_id not in own and key in self._used:
                is_colder = before < self._used[key]
                return Rivals(block_hash, get_block_hash(key)) if is_colder else None
        return None


def forget(pool: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
    """Takes these out of the prefix cache, as far as only one request holds them."""
    gone = {b.block_id for b in blocks if b.ref_cnt == 1 and b.block_hash is not None}
    if gone:
        pool.evict_blocks(gone)
