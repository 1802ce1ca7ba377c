"""How blocks that a request has dropped return to vLLM's pool."""

from collections.abc import Mapping, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvx.cache.prefix_eviction import forget


def in_turn_to_free(
    pool: BlockPool, dropped: Sequence[Mapping[int, KVCacheBlock]], stays: int | None
) -> list[KVCacheBlock]:
    """Blocks of one request in the order in which they may be freed now.

    dropped: by KV group and place in the request. stays: the place from which on the prefix cache
        need not keep them, None if it may keep all.

    The cache loses its end first: a prefix that lost a block in one group is lost in all.
    """
    if stays is not None:
        forget(pool, (b for group in dropped for place, b in group.items() if place >= stays))
    by_place = [(place, group) for group, blocks in enumerate(dropped) for place in blocks]
    return [dropped[group][place] for place, group in sorted(by_place, reverse=True)]
