"""Which policy's request brought each KV block in that is held: every block counts once.

A block that several requests share is one block of the pool. It counts under the policy whose
request took it from the free ones, for as long as anybody holds it: so the counts of all policies
add up to the blocks that the pool has given out, and never to more.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

# Of a block that nobody holds, or that nobody told us of.
_NOBODY = -1


class BlockOwners:
    """Blocks held, by policy row and KV group; kept up to date block by block.

    Managers say what they take. The pool says what goes back to it, when the last holder is gone.
    """

    def __init__(self, pool: BlockPool, num_groups: int, num_policies: int) -> None:
        self._pool, self._num_policies = pool, num_policies
        self._owners = [_NOBODY] * pool.num_gpu_blocks
        self._counts = [0] * (num_groups * num_policies)
        stock = pool.free_blocks

        def free_blocks(ordered_blocks: Iterable[KVCacheBlock]) -> None:
            blocks = list(ordered_blocks)
            stock(blocks)
            self._given_back(blocks)

        pool.free_blocks = free_blocks  # type: ignore[method-assign]

    def take(self, blocks: Sequence[KVCacheBlock], group: int, row: int) -> None:
        """A request of the policy in `row` took these, which were free, for a KV group."""
        key, owners = group * self._num_policies + row, self._owners
        for block in blocks:
            owners[block.block_id] = key
        self._counts[key] += len(blocks)

    def _given_back(self, blocks: Sequence[KVCacheBlock]) -> None:
        owners, counts = self._owners, self._counts
        for block in blocks:
            # Still held by another, or freed twice at once by two holders.
            if block.ref_cnt == 0 and (key := owners[block.block_id]) != _NOBODY:
                owners[block.block_id] = _NOBODY
                counts[key] -= 1

    def held(self, group: int, row: int) -> int:
        """Blocks of a KV group that count under the policy in `row`."""
        return self._counts[group * self._num_policies + row]

    @property
    def total(self) -> int:
        """Blocks held, of all groups and policies."""
        return sum(self._counts)

    @property
    def given_out(self) -> int:
        """Blocks that are not free, as the pool itself counts; vLLM's null block is none."""
        return self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
