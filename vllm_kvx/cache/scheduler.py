"""vLLM's schedulers, told what each request's policy stores and shares."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_kvx.cache.admission import PromptAdmission
from vllm_kvx.cache.decode_fast_path import DecodeFastPath
from vllm_kvx.cache.eviction import forget
from vllm_kvx.cache.later_stage_manager import LaterStageKVCacheManager
from vllm_kvx.cache.managers import FirstStageKVCacheManager, PolicyKVCacheManager
from vllm_kvx.cache.pool import pool_tokens
from vllm_kvx.cache.request_kv import KEPT_BLOCKS, PRIVATE_BLOCKS
from vllm_kvx.cache.scheduler_stats import PolicySchedulerStats, RunInFull
from vllm_kvx.cache.shared_blocks import free_end_first
from vllm_kvx.cache.sharing import PrefixSharing
from vllm_kvx.cache.states import STATE_BLOCKS, StateBlocks
from vllm_kvx.config.quoting import one_line, quoted
from vllm_kvx.config.settings import POLICY_KEY, KVSettings, request_policy
from vllm_kvx.policy.layout import check_fits
from vllm_kvx.policy.spec import KVPolicy, PolicyError, check_served

logger = init_logger("vllm.kvx.scheduler")


class _PolicyScheduling:
    """Mixin over vLLM's schedulers; scheduling itself stays theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = KVSettings.from_vllm_config(self.vllm_config)  # type: ignore[attr-defined]
        assert settings is not None
        self.kv_settings = settings
        self.later_stage_managers: list[LaterStageKVCacheManager] = [
            manager
            for manager in self.kv_cache_manager.coordinator.single_type_managers  # type: ignore[attr-defined]
            if isinstance(manager, LaterStageKVCacheManager)
        ]
        self.first_stage_managers: list[FirstStageKVCacheManager] = [
            manager
            for manager in self.kv_cache_manager.coordinator.single_type_managers  # type: ignore[attr-defined]
            if isinstance(manager, FirstStageKVCacheManager)
        ]
        managers: list[PolicyKVCacheManager] = [
            *self.first_stage_managers,
            *self.later_stage_managers,
        ]
        for manager in managers:
            manager.siblings = managers
        self.sharing = PrefixSharing(settings, self.kv_cache_manager, managers, self.vllm_config)  # type: ignore[attr-defined]
        self.admission = PromptAdmission(settings, self.vllm_config.scheduler_config)  # type: ignore[attr-defined]
        self._to_shrink: list[Request] = []
        DecodeFastPath(self.kv_cache_manager, managers, settings.debug)  # type: ignore[attr-defined]
        self.facts = PolicySchedulerStats(
            settings,
            self.kv_cache_manager.block_pool,  # type: ignore[attr-defined]
            self.first_stage_managers,
            self.later_stage_managers,
            self.admission,
        )
        self._counted_unshared: set[str] = set()
        pool = pool_tokens(
            self.kv_cache_config,  # type: ignore[attr-defined]
            settings,
            self.max_model_len,  # type: ignore[attr-defined]
        )
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        whole = config.cache_config.kv_cache_size_tokens
        for line in pool.lines(str(settings.policy), config.model_config.max_model_len, whole):
            logger.info("%s", line)

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:  # type: ignore[attr-defined]
            if request.resumable:
                if not self._asks_for_full(request):
                    self.facts.add_run_in_full(RunInFull.SESSION)
                _run_in_full(request, "its prompt has no end yet")
            elif problem := self._misfit(request):
                self.facts.add_run_in_full(RunInFull.MISFIT)
                _run_in_full(request, problem)
            policy = self._policy_of(request)
            self._tell_managers(request, policy)
            if not request.resumable:  # A session's later prompts have no arrival of their own.
                self.facts.add_request(request, str(policy))
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

    def _asks_for_full(self, request: Request) -> bool:
        try:
            return self._policy_of(request).is_full
        except PolicyError:
            return False

    def _policy_of(self, request: Request) -> KVPolicy:
        return request_policy(self.kv_settings, request.sampling_params)

    def _tell_managers(self, request: Request, policy: KVPolicy) -> None:
        row = self.facts.row_of(str(policy))
        storages = self.sharing.add_request(request, policy, row)
        self.admission.add_request(request, policy, any(s.changes for s in storages))

    def _get_local_prefix_cache_hit(
        self, request: Request, *max_cache_hit_length: int | None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """No longer than the policy may share, nor than 0.33's own limit, if it gives one."""
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        if not manager.prefix_cache_lookup_enabled(request):
            return super()._get_local_prefix_cache_hit(request, *max_cache_hit_length)  # type: ignore[misc]
        policy = self._policy_of(request)
        limit = self.sharing.limit(request, policy)
        # A waiting request is looked up in every step, and again once preempted.
        if limit is None and request.request_id not in self._counted_unshared:
            self._counted_unshared.add(request.request_id)
            self.facts.add_unshared(str(policy))
        if not limit:
            self.sharing.pass_up(request)
            return manager.empty_kv_cache_blocks, 0, 0, False
        limit = min([limit, *(most for most in max_cache_hit_length if most is not None)])
        return *self.sharing.find(request, limit), 0, False

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # False makes vLLM pass over the request and go on; where its first chunk gets no tokens,
        # vLLM begins none of those behind it.
        is_ready = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        num_left = len(self.kv_holding_waiting) + len(self.waiting)  # type: ignore[attr-defined]
        return not self.admission.is_passed_over(request, is_ready, num_left)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        start = request.num_computed_tokens + num_new_local_computed_tokens
        num_new_tokens = self.admission.clip(request, start, num_new_tokens)
        end, running = start + num_new_tokens, self.running  # type: ignore[attr-defined]
        if self.sharing.is_early(request, end, running):
            return 0
        self.sharing.choose(request, end, running)
        return num_new_tokens

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for request in self._to_shrink:
            self._shrink(request)
        self._to_shrink = []
        self.admission.new_step()
        # vLLM asks then where a chunk of a prompt may end; it does so for Mamba models alone.
        self.need_mamba_block_aligned_split = bool(self.admission.coming)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.admission.settle(self.running)  # type: ignore[attr-defined]
        self._to_shrink = self.admission.past_prompt(output.num_scheduled_tokens)
        private = {
            request.request_id: blocks
            for request in self._to_shrink
            if any(blocks := self.sharing.private_blocks(request.request_id))
        }
        if private:
            setattr(output, PRIVATE_BLOCKS, private)
        states = self.sharing.end_step(output.num_scheduled_tokens, self.requests)  # type: ignore[attr-defined]
        if states:
            setattr(output, STATE_BLOCKS, states)
        self._count_prefixes(output.num_scheduled_tokens, states)
        self.facts.tell(output, self.requests)  # type: ignore[attr-defined]
        return output

    def _count_prefixes(self, scheduled: dict[str, int], states: dict[str, StateBlocks]) -> None:
        looked_up, self.sharing.looked_up = self.sharing.looked_up, {}
        self.sharing.begin_prompts(scheduled, self.requests)  # type: ignore[attr-defined]
        for request_id, (hit, cached) in looked_up.items():
            request = self.requests.get(request_id)  # type: ignore[attr-defined]
            if request_id in scheduled and not request.num_preemptions:
                policy = self._policy_of(request)
                self.facts.add_prefix(str(policy), hit, cached)
        for request_id, blocks in states.items():
            if blocks.write:
                policy = self._policy_of(self.requests[request_id])  # type: ignore[attr-defined]
                self.facts.add_states(str(policy), len(blocks.write) * self.sharing.state_tokens)

    def _shrink(self, request: Request) -> None:
        """Frees what a request's last prompt chunk, scheduled in the step before, leaves behind."""
        self.admission.release(request.request_id)
        managers = (*self.first_stage_managers, *self.later_stage_managers)
        dropped = [
            manager.shrink(request.request_id, request.num_computed_tokens)
            for manager in managers
            if manager.req_to_blocks.get(request.request_id)
        ]
        self._give_back(request.request_id, dropped)

    def _give_back(self, request_id: str, dropped: list[Mapping[int, KVCacheBlock]]) -> None:
        """Frees blocks that a request no longer needs: by KV group and place."""
        pool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        kv = self.first_stage_managers[0].requests.get(request_id)
        if kv is not None and (stays := kv.stays) is not None:
            forget(pool, (b for group in dropped for place, b in group.items() if place >= stays))
        free_end_first(pool, dropped)

    def update_from_output(self, scheduler_output: SchedulerOutput, output: Any) -> Any:
        for request_id, kept in getattr(output, KEPT_BLOCKS, {}).items():
            request = self.requests.get(request_id)  # type: ignore[attr-defined]
            # One that was preempted since, and perhaps runs again, has other blocks.
            if request is None or request.num_stale_output_tokens:
                continue
            if request.num_computed_tokens >= request.num_prompt_tokens:
                dropped = [
                    manager.relink(request_id, request.num_computed_tokens, kept[manager.stage])
                    for manager in (*self.first_stage_managers, *self.later_stage_managers)
                    if manager.stage in kept
                ]
                self._give_back(request_id, dropped)
        by_client = super().update_from_output(scheduler_output, output)  # type: ignore[misc]
        self.facts.add_outputs(chain.from_iterable(each.outputs for each in by_client.values()))
        return by_client

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.sharing.keep_all(request.request_id)  # It is back soon.
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self.admission.restart(request)
        self.sharing.restart(request.request_id)
        self._to_shrink = [r for r in self._to_shrink if r is not request]

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)  # type: ignore[misc]
        self.facts.end_request(request)
        self._counted_unshared.discard(request.request_id)
        self.admission.remove_request(request.request_id)
        self.sharing.remove_request(request.request_id)
        self._to_shrink = [r for r in self._to_shrink if r is not request]
        for manager in (*self.first_stage_managers, *self.later_stage_managers):
            manager.remove_request(request.request_id)


def _run_in_full(request: Request, why: str) -> None:
    params = request.sampling_params
    if params is not None:
        params.extra_args = {**(params.extra_args or {}), POLICY_KEY: "full"}
    logger.warning("Request %s runs under `full`: %s.", quoted(request.request_id), one_line(why))


class PolicyScheduler(_PolicyScheduling, Scheduler):
    """``Scheduler`` under a KV policy."""


class AsyncPolicyScheduler(_PolicyScheduling, AsyncScheduler):
    """``AsyncScheduler`` under a KV policy."""
