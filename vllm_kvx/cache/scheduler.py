"""vLLM's schedulers, told what each request's policy stores and shares."""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_kvx.accounting import gap_of
from vllm_kvx.cache.policy_cache import PolicyKVCacheManager, RequestKV, anchor_hash
from vllm_kvx.cache.pool import pool_tokens
from vllm_kvx.policy.layout import check_fits
from vllm_kvx.policy.spec import KVPolicy, PolicyError, check_served
from vllm_kvx.policy.speed import Speed
from vllm_kvx.settings import POLICY_KEY, KVSettings, request_policy

logger = init_logger("vllm.kvx.scheduler")


class _PolicyScheduling:
    """Mixin over vLLM's schedulers; scheduling itself stays theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = KVSettings.from_vllm_config(self.vllm_config)  # type: ignore[attr-defined]
        assert settings is not None
        self.kv_settings = settings
        self.policy_managers: list[PolicyKVCacheManager] = [
            manager
            for manager in self.kv_cache_manager.coordinator.single_type_managers  # type: ignore[attr-defined]
            if isinstance(manager, PolicyKVCacheManager)
        ]
        self._unshared: dict[str, int] = {}
        self._counted_unshared: set[str] = set()
        pool = pool_tokens(self.kv_cache_config, settings)  # type: ignore[attr-defined]
        logger.info(
            "KV pool: %s blocks hold %s prompt tokens under %s, %.2fx the %s of stock vLLM",
            f"{pool.num_blocks:,}",
            f"{pool.policy:,}",
            settings.policy,
            pool.policy / max(pool.stock, 1),
            f"{pool.stock:,}",
        )
        propagate = settings.policy.propagate
        if self.kv_cache_manager.enable_caching and isinstance(propagate, Speed):  # type: ignore[attr-defined]
            lower = [m.spec.start_layer for m in self.policy_managers]
            if min(lower) < propagate.cutoff:
                logger.warning(
                    "%s shares no prefix here: kv_layout splits at layer %d, below its cutoff, "
                    "and that segment's entries are not in the prefix cache.",
                    settings.policy,
                    min(lower),
                )

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:  # type: ignore[attr-defined]
            if request.resumable:
                _run_in_full(request, "its prompt has no end yet")
            elif problem := self._misfit(request):
                _run_in_full(request, problem)
            policy = self._policy_of(request)
            for manager in self.policy_managers:
                manager.add_request(request.request_id, self._request_kv(request, policy, manager))
        super().add_request(request)  # type: ignore[misc]

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        super()._update_request_as_session(session, update)  # type: ignore[misc]
        _run_in_full(session, "its prompt has no end yet")

    def _misfit(self, request: Request) -> str | None:
        """Why the server cannot run the request's policy; callers may bypass the API's check."""
        try:
            policy = self._policy_of(request)
            check_served(policy)
            check_fits(policy, self.kv_settings.layout, self.kv_settings.num_layers)
        except PolicyError as error:
            return str(error)
        return None

    def _policy_of(self, request: Request) -> KVPolicy:
        return request_policy(self.kv_settings, request.sampling_params)

    def _request_kv(
        self, request: Request, policy: KVPolicy, manager: PolicyKVCacheManager
    ) -> RequestKV:
        gap = gap_of(policy, request.num_prompt_tokens, manager.spec.start_layer)
        anchors = policy.propagate.anchors if isinstance(policy.propagate, Speed) else 0
        key = None
        if manager.enable_caching and 0 < anchors <= manager.block_size and gap.size:
            key = anchor_hash(request.all_token_ids[:anchors], request.cache_salt)
        return RequestKV(gap, anchors, key)

    def _get_local_prefix_cache_hit(
        self, request: Request
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        if not manager.prefix_cache_lookup_enabled(request):
            return super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
        policy = self._policy_of(request)
        limit = self._sharable_tokens(request, policy)
        # A waiting request is looked up in every step, and again once preempted.
        if limit is None and request.request_id not in self._counted_unshared:
            self._counted_unshared.add(request.request_id)
            name = str(policy)
            self._unshared[name] = self._unshared.get(name, 0) + 1
        if not limit or not self._anchors_published(request):
            return manager.empty_kv_cache_blocks, 0, 0, False
        blocks, num_tokens, boundary, diverged = super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
        if num_tokens > limit:
            blocks, num_tokens = manager.truncate_computed_blocks(blocks, limit), limit
        if num_tokens == 0:
            return manager.empty_kv_cache_blocks, 0, 0, False
        return blocks, num_tokens, boundary, diverged

    def _sharable_tokens(self, request: Request, policy: KVPolicy) -> int | None:
        """Longest prefix, in whole blocks, that the request may take.

        None if its policy cannot share at all: some segment above the first stores every token
        (`full`, or a cutoff above that segment), or the anchors do not fit in one block.

        The upper layers of a hit are not computed: every token they must hold has to lie past it,
        or be an anchor, whose entries are handed over in one block.
        """
        if not isinstance(policy.propagate, Speed):
            return None
        anchors, tail = policy.propagate.anchors, policy.propagate.tail
        block_size: int = self.kv_cache_manager.coordinator.scheduler_block_size  # type: ignore[attr-defined]
        if anchors > block_size:
            return None
        for manager in self.policy_managers:
            gap = manager.requests[request.request_id].gap
            if gap.size == 0 and policy.propagate.cutoff > manager.spec.start_layer:
                return None  # A segment below the request's cutoff, where it stores everything.
        limit = max(request.num_prompt_tokens - tail, 0) // block_size * block_size
        return limit if limit > anchors else 0

    def _anchors_published(self, request: Request) -> bool:
        for manager in self.policy_managers:
            key = manager.requests[request.request_id].anchor_hash
            if key is not None and manager.find_anchors(key) is None:
                return False
        return True

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._unshared:
            # Rides to the workers, whose counters the metrics read.
            output.kv_policy_unshared, self._unshared = self._unshared, {}
        return output

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)  # type: ignore[misc]
        self._counted_unshared.discard(request.request_id)
        for manager in self.policy_managers:
            manager.remove_request(request.request_id)


def _run_in_full(request: Request, why: str) -> None:
    params = request.sampling_params
    if params is not None:
        params.extra_args = {**(params.extra_args or {}), POLICY_KEY: "full"}
    logger.warning("Request %s runs under `full`: %s.", request.request_id, why)


class PolicyScheduler(_PolicyScheduling, Scheduler):
    """``Scheduler`` under a KV policy."""


class AsyncPolicyScheduler(_PolicyScheduling, AsyncScheduler):
    """``AsyncScheduler`` under a KV policy."""
