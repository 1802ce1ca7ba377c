"""KV groups of layers without full attention, and of drafters: the part they have in prefix hits.

A window holds the last blocks of a prefix alone, and a state what it was at some boundaries. So
they may have less of a prefix than the layers with full attention, which have every block of it.
Most follow no policy. Windows above a cut do: a request takes part of a prefix there if it would
compute all of the prefix's tokens in these layers.

A drafter's layers have full attention. Where it drafts by the model's hidden states, an entry
follows from the next token, too: the last one of a block may be of another text's. vLLM calls such
groups EAGLE's. They find one block more of a prefix than they take.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from vllm_kvx.cache.managers import PolicyKVCacheManager
from vllm_kvx.cache.request_kv import RequestKV


class OtherGroups:
    """These KV groups of a server with its prefix cache on."""

    def __init__(self, coordinator: HybridKVCacheCoordinator, groups: Sequence[Any]) -> None:
        """groups: vLLM's ``SpecGroup`` of each kind of layer."""
        self._coordinator, self._groups = coordinator, groups

    @classmethod
    def of(
        cls, coordinator: KVCacheCoordinator, ours: Collection[SingleTypeKVCacheManager]
    ) -> "OtherGroups | None":
        """None where there are none, or prefixes are not cached.

        ours: the managers of layers with full attention.
        """
        if not isinstance(coordinator, HybridKVCacheCoordinator):
            return None
        known = {manager.kv_cache_group_id for manager in ours}
        groups = [g for g in coordinator.attention_groups if not known & set(g.group_ids)]
        return cls(coordinator, groups) if groups else None

    def follow(self, requests: Mapping[str, RequestKV]) -> None:
        """From now on, no answer under a policy whose decode is lossy is published by vLLM.

        Windows and states of its tokens follow from what the policy has read of the prompt. Layers
        with full attention do not publish them either, but others may compute the same tokens as a
        prompt: then the cache would have both under one hash. And nothing of a policy is published
        whose chosen tokens run again from the first layer on, in the place of the prompt. Windows
        are kept also where prompts of a policy go on from the cache.

        requests: by id, those of a manager that follows policies.
        """
        for group in self._groups:
            for group_id in group.group_ids:
                manager = self._coordinator.single_type_managers[group_id]
                if not isinstance(manager, PolicyKVCacheManager):
                    _follow(manager, requests)

    @property
    def are_drafters(self) -> bool:
        """Whether all of them are, so that no chunk that ends elsewhere would find more."""
        return all(isinstance(group.spec, FullAttentionSpec) for group in self._groups)

    def peak_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens holds at most in those that follow no policy."""
        managers = (
            self._coordinator.single_type_managers[group_id]
            for group in self._groups
            for group_id in group.group_ids
        )
        return sum(
            peak_blocks(manager, num_tokens)
            for manager in managers
            if not isinstance(manager, PolicyKVCacheManager)
        )

    def find(
        self, request_id: str, hashes: Sequence[BlockHash], length: int, grain: int
    ) -> tuple[int, dict[int, list[KVCacheBlock]]]:
        """The longest prefix of at most `length` tokens that all of them have, and their blocks.

        Each kind accepts a length or makes it shorter, as in vLLM's own lookup, until all agree.

        Args:
            request_id: groups that follow policies take part if it reads them.
            hashes: of the request's blocks, in vLLM's hash block size.
            grain: tokens that the prefix is a multiple of.
        """
        coordinator, blocks = self._coordinator, dict[int, list[KVCacheBlock]]()
        before = -1
        while length and length != before:
            before = length = length // grain * grain
            for spec, group_ids, manager_cls, drops_last in self._groups:
                manager = coordinator.single_type_managers[group_ids[0]]
                is_ours = isinstance(manager, PolicyKVCacheManager)
                if is_ours and not manager.requests[request_id].reads:
                    continue
                most = length
                if drops_last:
                    most += manager.block_size
                    most = min(most, len(hashes) * coordinator.hash_block_size)
                found, length = manager_cls.find_longest_cache_hit(
                    block_hashes=hashes,
                    max_length=most,
                    kv_cache_group_ids=group_ids,
                    block_pool=manager.block_pool,
                    kv_cache_spec=spec,
                    drop_eagle_block=drops_last,
                    alignment_tokens=coordinator.scheduler_block_size,
                    dcp_world_size=manager.dcp_world_size,
                    pcp_world_size=manager.pcp_world_size,
                )
                blocks.update(zip(group_ids, found, strict=True))
        return length, blocks if length else {}


def peak_blocks(manager: SingleTypeKVCacheManager, num_tokens: int) -> int:
    """Blocks of so many stored tokens, as admission counts them: not those behind a window."""
    count, most = cdiv(num_tokens, manager.block_size), manager.max_admission_blocks_per_request
    return count if most is None else min(count, most)


def _follow(manager: SingleTypeKVCacheManager, requests: Mapping[str, RequestKV]) -> None:
    stock = manager.cache_blocks

    def cache_blocks(request: Request, num_tokens: int, *args: Any, **options: Any) -> None:
        kv, prompt_len = requests.get(request.request_id), request.num_prompt_tokens
        propagate = kv.policy.propagate if kv is not None else None
        if propagate is not None and propagate.restarts:
            return
        if kv is not None and kv.policy.is_lossy_decode and num_tokens > prompt_len:
            num_tokens = prompt_len
            # Mamba 2 may have kept a state of the answer, which would be published besides.
            checkpoints = getattr(manager, "_checkpoints", {})
            if checkpoints.get(request.request_id, (0,))[0] > prompt_len:
                del checkpoints[request.request_id]
            done = manager.num_cached_block.get(request.request_id, 0)
            if done >= num_tokens // manager.block_size:
                return
        if kv is not None and isinstance(manager, SlidingWindowManager):
            options["replay_boundaries"] = (*options["replay_boundaries"], *kv.resumes)
        stock(request, num_tokens, *args, **options)

    manager.cache_blocks = cache_blocks  # type: ignore[method-assign]
