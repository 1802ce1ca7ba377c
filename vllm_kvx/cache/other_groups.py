"""KV groups that follow no policy, and the part that they have in prefix hits.

A window holds the last blocks of a prefix alone, and a state what it was at some boundaries. So
they may have less of a prefix than the layers with full attention, which have every block of it.
"""

from collections.abc import Collection, Sequence
from typing import Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


class OtherGroups:
    """The KV groups of a server whose managers are vLLM's own, with its prefix cache on."""

    def __init__(self, coordinator: HybridKVCacheCoordinator, groups: Sequence[Any]) -> None:
        """groups: vLLM's ``SpecGroup`` of each kind of layer."""
        self._coordinator, self._groups = coordinator, groups

    @classmethod
    def of(
        cls, coordinator: KVCacheCoordinator, ours: Collection[SingleTypeKVCacheManager]
    ) -> "OtherGroups | None":
        """None where there are none, or prefixes are not cached."""
        if not isinstance(coordinator, HybridKVCacheCoordinator):
            return None
        known = {manager.kv_cache_group_id for manager in ours}
        groups = [g for g in coordinator.attention_groups if not known & set(g.group_ids)]
        return cls(coordinator, groups) if groups else None

    def find(
        self, hashes: Sequence[BlockHash], length: int
    ) -> tuple[int, dict[int, list[KVCacheBlock]]]:
        """The longest prefix of at most `length` tokens that all of them have, and their blocks.

        Each kind accepts a length or makes it shorter, as in vLLM's own lookup, until all agree.

        Args:
            hashes: of the request's blocks, in vLLM's hash block size.
        """
        coordinator, blocks = self._coordinator, dict[int, list[KVCacheBlock]]()
        before = -1
        while length and length != before:
            before = length
            for spec, group_ids, manager_cls, _ in self._groups:
                manager = coordinator.single_type_managers[group_ids[0]]
                found, length = manager_cls.find_longest_cache_hit(
                    block_hashes=hashes,
                    max_length=length,
                    kv_cache_group_ids=group_ids,
                    block_pool=manager.block_pool,
                    kv_cache_spec=spec,
                    drop_eagle_block=False,
                    alignment_tokens=coordinator.scheduler_block_size,
                    dcp_world_size=manager.dcp_world_size,
                    pcp_world_size=manager.pcp_world_size,
                )
                blocks.update(zip(group_ids, found, strict=True))
        return length, blocks if length else {}
