"""Which prompts stay in the prefix cache where it cannot hold all that come back.

vLLM evicts what was not used for longest. Where sessions take turns and need a little more than
the pool, that is always what is asked for next, and soon nobody finds anything. So a prompt that
comes back too late, when a part of it is gone and everything that could go in its place was used
since, may compute that part without keeping it: else it pushes out what is asked for sooner. This
is the rule of LIRS (Jiang and Zhang, SIGMETRICS 2002): a block's reuse distance against the recency
of the coldest one that is kept. A prompt that was computed without being kept counts as used all
the same. So one that comes back a second time, while the coldest block was not asked for, is kept.

Sessions that end without a word mislead the rule, for their blocks look as if they were to be used;
so it is followed as long as it proves right: of a part that came too late and the coldest block
that was there, which is asked for first? That is Belady's question, answered later. Nothing changes
where nothing is lost, or where blocks are empty.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    make_block_hash_with_group_id,
)

# Of the last answers that count, by how many the balance may lean to a side; and questions open.
_MOST, _OPEN = 8, 256
# Seconds without a prompt after which answers are outdated.
_IDLE = 600.0


@dataclass(frozen=True)
class Rivals:
    """What a prompt asked for too late, and the coldest block that would go for it.

    needed: blocks of all groups that the prompt takes.
    """

    lost: BlockHash
    coldest: BlockHash
    needed: int = field(default=0, compare=False)


class Recency:
    """Knows when blocks of a pool's prefix cache were used last, and some that the pool has lost.

    Time is counted in prompts that began. It remembers as many lost blocks as the pool has.
    """

    def __init__(
        self, pool: BlockPool, clock: Callable[[], float] = time.monotonic, group: int = 0
    ) -> None:
        """clock: seconds, of which only differences count.

        group: the first KV group of the first stage. Its blocks tell for all, as do those of
            states, which count as its own: a prefix that lost a block in one is lost in all.
        """
        self._pool, self._now, self._clock, self._last = pool, 0, clock, clock()
        self._group = group
        self._suffix = make_block_hash_with_group_id(BlockHash(b""), group)
        # By key, in the order of use: those that were cached when last looked at, with their
        # blocks, and those that were not.
        self._cached: dict[BlockHashWithGroupId, tuple[int, KVCacheBlock]] = {}
        self._lost: dict[BlockHashWithGroupId, int] = {}
        # Blocks at the head of the pool's queue that hold nothing.
        self._empty = pool.get_num_free_blocks()
        # Of these, how many serve one after the other of those that are not kept: no room for more.
        self._served = 0
        # By the lost part's hash, the coldest block's, in the order in which they met.
        self._open: dict[BlockHash, BlockHash] = {}
        self._balance = 0
        free, reset, take = pool.free_blocks, pool.reset_prefix_cache, pool.get_new_blocks

        def free_blocks(ordered_blocks: Iterable[KVCacheBlock]) -> None:
            blocks = list(ordered_blocks)
            free(blocks)
            self._note(blocks)

        def get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
            blocks = take(num_blocks)
            self._empty = max(self._empty - num_blocks, 0)
            return blocks

        def reset_prefix_cache() -> bool:
            is_done = reset()
            if is_done:
                self._cached.clear()
                self._lost.clear()
                self._open.clear()
                self._balance, self._served = 0, 0
                self._empty = pool.get_num_free_blocks()
            return is_done

        pool.free_blocks = free_blocks  # type: ignore[method-assign]
        pool.get_new_blocks = get_new_blocks  # type: ignore[method-assign]
        pool.reset_prefix_cache = reset_prefix_cache  # type: ignore[method-assign]

    @property
    def is_strict(self) -> bool:
        """Whether what comes too late is not to be kept, as far as answers say.

        Who asked before a time without prompts need not be who asks now.
        """
        return self._balance > 0 and not self._is_outdated

    @property
    def _is_outdated(self) -> bool:
        return self._clock() - self._last > _IDLE

    def begin_prompt(self, asked: Iterable[BlockHash], rivals: Rivals | None) -> None:
        """A prompt begins. asked: its blocks' hashes, whether cached or not; rivals: its own."""
        if self._is_outdated:
            self._balance = 0
            self._open.clear()
        self._now, self._last = self._now + 1, self._clock()
        hashes = set(asked) if self._open or rivals is not None else set()
        for lost, coldest in list(self._open.items()):
            if coldest in hashes or lost in hashes:
                del self._open[lost]
                found = self._balance + (1 if coldest in hashes else -1)
                self._balance = max(-_MOST, min(found, _MOST))
        if not self.is_strict:
            self._served = 0
        if rivals is not None:
            if self.is_strict:
                self._served = max(self._served, rivals.needed)
            self._open[rivals.lost] = rivals.coldest
            if len(self._open) > _OPEN:
                del self._open[next(iter(self._open))]
            # What is gone is used now, whether it is kept or not.
            self._use_lost(hashes)

    def _use_lost(self, hashes: Iterable[BlockHash]) -> None:
        lost, now = self._lost, self._now
        for each in hashes:
            key = make_block_hash_with_group_id(each, self._group)
            # Those that this step computes have their names already: they are noted again if they
            # are kept.
            if key in lost:
                del lost[key]
                lost[key] = now

    def _note(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Blocks were given back by a request."""
        cached, lost, now = self._cached, self._lost, self._now
        # One that two holders give back at once is there twice.
        for block in {each.block_id: each for each in blocks}.values():
            key = block.block_hash
            if key is None:
                self._empty += block.ref_cnt == 0 and not block.is_null
            elif key.endswith(self._suffix):
                cached.pop(key, None)
                lost.pop(key, None)
                cached[key] = now, block
        while len(cached) > self._pool.num_gpu_blocks:
            self._lose(next(iter(cached)))

    def _lose(self, key: BlockHashWithGroupId) -> None:
        """The key's block is cached no longer, or in use: it is noted again when it is free."""
        self._lost.pop(key, None)
        self._lost[key] = self._cached.pop(key)[0]
        if len(self._lost) > self._pool.num_gpu_blocks:
            del self._lost[next(iter(self._lost))]

    def too_late(
        self, block_hash: BlockHash, found: Iterable[KVCacheBlock], needed: int
    ) -> Rivals | None:
        """Whether the first block of a prompt that is not in the cache was there too long ago.

        It was used before all those that could be evicted for it.

        found: blocks before it, which the same request is about to use. needed: blocks that the
            request takes beside them, of all groups; as many empty ones leave nothing to evict.
        """
        key = make_block_hash_with_group_id(block_hash, self._group)
        before = self._lost.get(key)
        if before is None:
            if key not in self._cached:
                return None
            before = self._cached[key][0]
        if needed <= self._empty - self._served:
            return None
        own = {block.block_id for block in found}
        gone = []
        coldest = None
        for each, (used, block) in self._cached.items():
            if block.block_hash != each or block.ref_cnt:
                gone.append(each)
            elif block.block_id not in own:
                coldest = (
                    Rivals(block_hash, get_block_hash(each), needed) if before < used else None
                )
                break
        # No call looks at these again.
        for each in gone:
            self._lose(each)
        return coldest


def forget(pool: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
    """Takes these out of the prefix cache, as far as only one request holds them."""
    gone = {b.block_id for b in blocks if b.ref_cnt == 1 and b.block_hash is not None}
    if gone:
        pool.evict_blocks(gone)
