"""The memory that a server's KV cache groups share, for schedulers that run without a model."""

from collections.abc import Sequence
from typing import Any


def pool_of(groups: Sequence[Any], num_blocks: int, **options: Any) -> Any:
    """The ``KVCacheConfig`` of a pool of `num_blocks` for these ``KVCacheGroupSpec``.

    One tensor has room for the largest group's layers, one after the other, in pages of the
    largest size. options: further fields of ``KVCacheConfig``.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

    page, names = max((g.kv_cache_spec.page_size_bytes, g.layer_names) for g in groups)
    size = num_blocks * page * max(len(group.layer_names) for group in groups)
    tensor = KVCacheTensor(size, names, layer_stride=page * num_blocks, block_stride=page)
    return KVCacheConfig(num_blocks, [tensor], list(groups), **options)
