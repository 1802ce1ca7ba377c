"""How blocks that a request has dropped return to vLLM's pool."""

from collections.abc import Mapping, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvx.cache.prefix_eviction import forget


def give_back(
    pool: BlockPool, dropped: Sequence[Mapping[int, KVCacheBlock]], stays: int | None
) -> None:
    """Returns blocks of one request to the pool.

    dropped: by KV group and place in the request. stays: the place from which on the prefix cache
        need not keep them, None if it may keep all.
    """
    if stays is not None:
        forget(pool, (b for group in dropped for place, b in group.items() if place >= stays))
    free_end_first(pool, dropped)


def free_end_first(pool: BlockPool, groups: Sequence[Mapping[int, KVCacheBlock]]) -> None:
    """Frees blocks of one request, by KV group and place, so that the cache loses its end first.

    A prefix that lost a block in one group is lost in all.
    """
    by_place = [(place, group) for group, blocks in enumerate(groups) for place in blocks]
    pool.free_blocks(groups[group][place] for place, group in sorted(by_place, reverse=True))
