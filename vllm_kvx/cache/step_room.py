"""Whether a step has room for what the ends of prompts take in it, so that nobody is preempted."""

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus

from vllm_kvx.cache.managers import PolicyKVCacheManager


class StepRoom:
    """Of one server, over its managers: all blocks come from one pool."""

    def __init__(
        self,
        managers: Sequence[PolicyKVCacheManager],
        kv_cache_manager: KVCacheManager,
        config: VllmConfig,
    ) -> None:
        """managers: of the KV groups that follow policies."""
        self._managers, self._kv_cache_manager = managers, kv_cache_manager
        self._pool, self._block_size = kv_cache_manager.block_pool, managers[0].block_size
        groups = kv_cache_manager.kv_cache_config.kv_cache_groups
        # By KV group, tokens of a block: layers of other kinds may have blocks of another size.
        self._block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self._is_on = kv_cache_manager.enable_caching
        self._max_tokens = config.scheduler_config.max_num_batched_tokens

    def choose(self, request: Request, end: int, running: Sequence[Request]) -> None:
        """Decides whether a prompt that is compacted in this step stays in the cache.

        That takes new blocks for what retention keeps, until the step after frees the prompt's. It
        must not preempt anyone: there has to be room beside it for all that requests which run may
        take in this step, prompts that end in it included.
        """
        if not self._is_on or end != self._settles_at(request):
            return
        kvs = [manager.requests[request.request_id] for manager in self._managers]
        moving = [kv for kv in kvs if kv.reads and kv.compacts_at(end)]
        if not moving:
            return
        needed = self._kv_cache_manager.watermark_blocks
        for size in self._block_sizes:
            needed += len(running) + 1 + cdiv(self._max_tokens, size)
        needed += sum(cdiv(kv.storage.kept, self._block_size) for kv in moving)
        ending = [request.request_id]
        for other in running:
            ends = self._ends(other)
            left = (end - other.num_computed_tokens for end in ends)
            if other is not request and any(0 < count <= self._max_tokens for count in left):
                ending.append(other.request_id)
        needed += sum(m.num_blocks_to_end(name) for m in self._managers for name in ending)
        moves_out = needed <= self._pool.get_num_free_blocks()
        for kv in moving:
            kv.moves_out = moves_out

    def is_early(self, request: Request, end: int, running: Sequence[Request]) -> bool:
        """Whether a running prompt that could end in this step had better end in the next one.

        Another prompt, compacted in this step, gives back blocks of theirs after it. Until then
        these have to be copied, and where the pool has no room for that, somebody would be
        preempted.
        """
        if not self._is_on or end != self._settles_at(request):
            return False
        if request.status != RequestStatus.RUNNING:  # Others are not admitted without room.
            return False
        name = request.request_id
        ending = [m for m in self._managers if m.requests[name].compacts_at(end)]
        if not any(manager.num_passing_copies(name) for manager in ending):
            return False
        # What the others may take in this step.
        needed = len(self._block_sizes) * len(running)
        needed += sum(manager.num_blocks_to_end(name) for manager in self._managers)
        return needed > self._pool.get_num_free_blocks()

    def _ends(self, request: Request) -> set[int]:
        """The tokens with which entries of the request appear or go."""
        kvs = [manager.requests[request.request_id] for manager in self._managers]
        chosen = {kv.storage.chosen_at for kv in kvs if kv.storage.chosen_at is not None}
        return {self._settles_at(request), *chosen}

    def _settles_at(self, request: Request) -> int:
        """The tokens with which the request is compacted, if it is: see ``Storage``."""
        kvs = (manager.requests[request.request_id] for manager in self._managers)
        return max(kv.storage.settles_at for kv in kvs)
