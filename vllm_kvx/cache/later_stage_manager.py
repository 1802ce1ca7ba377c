"""Managers of KV groups above the first stage, and the anchors that prefix hits bring there."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.request import Request

from vllm_kvx.cache.managers import PolicyKVCacheManager
from vllm_kvx.cache.request_kv import RequestKV


class LaterStageKVCacheManager(PolicyKVCacheManager):
    """Blocks of one KV group above the first stage, sized by stored entries.

    On a prefix hit in the first stage the anchors are not computed, but their entries up here
    depend on their own tokens alone. So the first block of a request that did compute them is
    published under the anchors' tokens, and a request with a hit copies it into its own. The
    first block of a request that stores every token here begins with them as well.
    """

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._to_publish: dict[str, BlockHash] = {}
        self._to_copy: dict[str, KVCacheBlock] = {}
        # First blocks published in this step: copies run before the forward pass that writes them.
        self._unwritten: set[int] = set()

    def find_anchors(self, kv: RequestKV) -> KVCacheBlock | None:
        """A published block that starts with the request's anchors, if one is in the pool."""
        for key in () if kv.anchor_hash is None else (kv.anchor_hash, kv.first_hash):
            found = key and self.block_pool.get_cached_block(key, [self.kv_cache_group_id])
            if found and found[0].block_id not in self._unwritten:
                return found[0]
        return None

    def _num_evictable_beside(self, request_id: str) -> int:
        source = self.find_anchors(self.requests[request_id])
        return 0 if source is None else self._get_num_evictable_blocks([source])

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        super().add_local_computed_blocks(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
        kv = self.requests.get(request_id)
        if kv is not None and num_local_computed_tokens > 0:
            source = self.find_anchors(kv)
            if source is not None:
                if source.ref_cnt == 0:
                    self._took(request_id, [source])
                self.block_pool.touch([source])
                self._to_copy[request_id] = source

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        new_blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        source = self._to_copy.pop(request_id, None) if new_blocks else None
        if source is not None:
            # The scheduler releases both ends once the copy has run, hence the extra reference.
            self._pending_cow_copies.append((source, new_blocks[0]))
            new_blocks[0].ref_cnt += 1
        return new_blocks

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        is_first = not self.num_cached_block.get(request.request_id)
        super().cache_blocks(
            request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
        )
        blocks = self.req_to_blocks.get(request.request_id)
        if is_first and blocks and self.num_cached_block.get(request.request_id):
            self._unwritten.add(blocks[0].block_id)
        kv = self.requests.get(request.request_id)
        if kv is None or kv.anchor_hash is None or num_tokens < kv.anchors:
            return
        if blocks and blocks[0].block_hash is None:
            self._to_publish.setdefault(request.request_id, kv.anchor_hash)

    def new_step_starts(self) -> None:
        """Publishes anchors that the previous step computed.

        Not earlier: copies run before a step's forward pass, so a request scheduled in the same
        step as the one that computes the anchors would copy an unwritten block.
        """
        super().new_step_starts()
        self._unwritten.clear()
        for request_id, anchor_hash in self._to_publish.items():
            blocks = self.req_to_blocks.get(request_id)
            if not blocks or blocks[0].block_hash is not None:
                continue
            if not self.block_pool.get_cached_block(anchor_hash, [self.kv_cache_group_id]):
                key = make_block_hash_with_group_id(anchor_hash, self.kv_cache_group_id)
                self.block_pool._insert_block_hash(key, blocks[0], num_tokens=self.block_size)
        self._to_publish.clear()

    def pop_blocks(self, request_id: str) -> list[KVCacheBlock]:
        self._to_publish.pop(request_id, None)
        source = self._to_copy.pop(request_id, None)
        blocks = super().pop_blocks(request_id)
        return blocks if source is None else [*blocks, source]

    @classmethod
    def find_longest_cache_hit(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("groups of a policy stage take no part in prefix lookups")
