"""Decode steps that take no block and publish none: most of them, and vLLM need not look.

vLLM asks every KV group of every running request in each step whether it needs a block, and again
whether one is full and can be published. The groups of a policy make that several times as many
questions as stock vLLM asks. All answers are known in advance: from one block's end to the next a
decoding request needs nothing, in any group. So the scheduler remembers up to how many tokens that
holds, and asks again when a request gets there.

That is known of a drafter's groups, too, which are vLLM's own: they hold all tokens, and have room
for those to be drafted.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from vllm_kvx.cache.managers import PolicyKVCacheManager
from vllm_kvx.cache.request_kv import NEVER, RequestKV


class NoBlocks(KVCacheBlocks):
    """None in any group, which need not be looked up group by group."""

    def get_block_ids(self, allow_none: bool = False, **options: Any) -> Any:
        return None if allow_none else super().get_block_ids(**options)


class DecodeFastPath:
    """Stands before ``allocate_slots`` and ``cache_blocks`` of a server's KV cache manager.

    A request's ``RequestKV`` of the first group holds what is remembered of it. Where its blocks
    are given back, by any way, that is forgotten.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        groups: Sequence[PolicyKVCacheManager],
        checks: bool = False,
        drafters: Sequence[SingleTypeKVCacheManager] = (),
        num_ahead: int = 0,
    ) -> None:
        """groups: the managers of all KV groups, but for those of a drafter, if there is one.

        checks: vLLM looks after all, to compare. num_ahead: tokens that the drafter has room for.
        """
        self._groups, self._requests = groups, groups[0].requests
        self._drafters, self._num_ahead = drafters, num_ahead
        # How vLLM asks for the next tokens of a request that runs: only this is answered here.
        plainly = {"num_lookahead_tokens": num_ahead}
        requests, nothing = self._requests, NoBlocks(manager.empty_kv_cache_blocks.blocks)
        allocate, cache = manager.allocate_slots, manager.cache_blocks

        def allocate_slots(
            request: Request, num_new_tokens: int, *args: Any, **options: Any
        ) -> KVCacheBlocks | None:
            if not args and options == plainly:
                kv = requests.get(request.request_id)
                tokens = request.num_computed_tokens + num_new_tokens
                # Tokens that are computed and not known yet are published by nobody.
                if (
                    kv is not None
                    and tokens <= kv.room
                    and min(tokens, request.num_tokens) < kv.full_at
                ):
                    if checks:
                        self._check(request, partial(allocate, request, num_new_tokens, **options))
                    return nothing
            blocks = allocate(request, num_new_tokens, *args, **options)
            self._remember(request)
            return blocks

        def cache_blocks(request: Request, num_computed_tokens: int) -> None:
            kv = requests.get(request.request_id)
            if kv is None or num_computed_tokens >= kv.full_at:
                cache(request, num_computed_tokens)
                self._remember(request)
            elif checks:
                self._check(request, partial(cache, request, num_computed_tokens))

        manager.allocate_slots = allocate_slots  # type: ignore[method-assign]
        manager.cache_blocks = cache_blocks  # type: ignore[method-assign]

    def _remember(self, request: Request) -> None:
        kv = self._requests.get(request.request_id)
        if kv is None:
            return
        tokens, kv.room, kv.full_at = request.num_computed_tokens, 0, 0
        if tokens >= request.num_prompt_tokens:
            ends = [group.fast_path_until(request.request_id, tokens) for group in self._groups]
            ends += [self._drafter_until(group, request, kv) for group in self._drafters]
            kv.room, kv.full_at = (min(each) for each in zip(*ends, strict=True))

    def _drafter_until(
        self, group: SingleTypeKVCacheManager, request: Request, kv: RequestKV
    ) -> tuple[int, int]:
        """As ``fast_path_until``, of a group of the drafter."""
        name, size = request.request_id, group.block_size
        room = len(group.req_to_blocks.get(name, ())) * size - self._num_ahead
        full_at = (group.num_cached_block.get(name, 0) + 1) * size
        # See ``OtherGroups.follow``.
        ends = kv.policy.is_lossy_decode and full_at > request.num_prompt_tokens
        return room, NEVER if ends or not group.enable_caching else full_at

    def _check(self, request: Request, ask: Callable[[], KVCacheBlocks | None]) -> None:
        """That vLLM, asked by `ask`, does nothing indeed.

        Raises:
            RuntimeError: it would take blocks or publish some (debug switch ``kv_debug``).
        """
        name = request.request_id
        groups = *self._groups, *self._drafters
        before = [group.num_cached_block.get(name) for group in groups]
        blocks = ask()
        after = [group.num_cached_block.get(name) for group in groups]
        if (blocks is not None and any(blocks.blocks)) or before != after:
            raise RuntimeError(
                f"request {name} with {request.num_computed_tokens} computed tokens should need "
                f"nothing, and vLLM gives it {blocks} and has {after} of its blocks in the prefix "
                f"cache, by KV group, where it had {before}"
            )
