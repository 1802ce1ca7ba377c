"""vLLM's schedulers, told what each request's policy stores and shares."""

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_kvx.cache.adapter_slots import AdapterSlots
from vllm_kvx.cache.admission import PromptAdmission
from vllm_kvx.cache.decode_fast_path import DecodeFastPath
from vllm_kvx.cache.draft_slots import reserve_slots
from vllm_kvx.cache.dropped_blocks import in_turn_to_free
from vllm_kvx.cache.external_prefixes import limit_external_hits
from vllm_kvx.cache.handed_over import HandedOverPrompts, is_to_hand_over, tell
from vllm_kvx.cache.kv_cache_specs import DraftAttentionSpec
from vllm_kvx.cache.kv_events import report_last_blocks_alone
from vllm_kvx.cache.later_stage_manager import LaterStageKVCacheManager
from vllm_kvx.cache.managers import FirstStageKVCacheManager, PolicyKVCacheManager
from vllm_kvx.cache.messages import PolicyStep, StateBlocks, attach, result_of
from vllm_kvx.cache.pool_capacity import pool_tokens
from vllm_kvx.cache.resumed_rows import ResumedRows
from vllm_kvx.cache.scheduler_stats import PolicySchedulerStats, RunInFull
from vllm_kvx.cache.sharing import PrefixSharing
from vllm_kvx.cache.sliding_stage_manager import SlidingStageKVCacheManager
from vllm_kvx.config.quoting import one_line, quoted
from vllm_kvx.config.settings import POLICY_KEY, KVSettings, request_policy
from vllm_kvx.policy.layout import check_fits
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy

logger = init_logger("vllm.kvx.scheduler")


# A mixin's `self` is one of vLLM's schedulers, which only a type checker has to know.
if TYPE_CHECKING:
    _Base = Scheduler
else:
    _Base = object


class _PolicyScheduling(_Base):
    """Mixin over vLLM's schedulers; scheduling itself stays theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Where the model drafts for itself, vLLM does not know it and has to be told.
        reserve_slots()
        super().__init__(*args, **kwargs)
        settings = KVSettings.from_vllm_config(self.vllm_config)
        assert settings is not None
        self.kv_settings = settings
        every = self.kv_cache_manager.coordinator.single_type_managers
        self.later_stage_managers: list[LaterStageKVCacheManager] = [
            manager for manager in every if isinstance(manager, LaterStageKVCacheManager)
        ]
        self.first_stage_managers: list[FirstStageKVCacheManager] = [
            manager for manager in every if isinstance(manager, FirstStageKVCacheManager)
        ]
        self._sliding_managers = [
            manager for manager in every if isinstance(manager, SlidingStageKVCacheManager)
        ]
        managers: list[PolicyKVCacheManager] = [
            *self.first_stage_managers,
            *self.later_stage_managers,
        ]
        for manager in managers:
            manager.siblings = managers
            manager.holds_drafts = settings.drafts is not None
        told = [*managers, *self._sliding_managers]
        self.sharing = PrefixSharing(settings, self.kv_cache_manager, told, self.vllm_config)
        report_last_blocks_alone(self.kv_cache_manager.block_pool)
        vocab_size = self.vllm_config.model_config.get_vocab_size()
        self.handed_over = HandedOverPrompts(managers, vocab_size)
        if self.connector is not None:
            limit_external_hits(self.connector, self._may_load)
        self.admission = PromptAdmission(settings, self.vllm_config.scheduler_config)
        self.resumed_rows = ResumedRows(settings, self.vllm_config)
        self._adapter_slots = AdapterSlots(self.vllm_config)
        self._to_shrink: list[Request] = []
        num_groups = len(self.kv_cache_config.kv_cache_groups)
        self._has_states = self.need_mamba_block_aligned_split
        drafters = [
            manager for manager in every if isinstance(manager.kv_cache_spec, DraftAttentionSpec)
        ]
        # Windows move in every step, and vLLM has to look.
        if len(managers) + len(drafters) == num_groups:
            ahead = self.num_lookahead_tokens if drafters else 0
            DecodeFastPath(self.kv_cache_manager, managers, settings.debug, drafters, ahead)
        self.policy_stats = PolicySchedulerStats(
            settings,
            self.kv_cache_manager.block_pool,
            self.first_stage_managers,
            self.later_stage_managers,
            self.admission,
            owns_all=len(managers) == num_groups,
        )
        self._counted_unshared: set[str] = set()
        pool = pool_tokens(self.kv_cache_config, settings, self.max_model_len)
        config: Any = self.vllm_config
        whole = config.cache_config.kv_cache_size_tokens
        for line in pool.lines(str(settings.policy), config.model_config.max_model_len, whole):
            logger.info("%s", line)

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            policy = self._choose_policy(request)
            self._tell_managers(request, policy)
            if self.connector is not None and self.handed_over.add_request(request, policy):
                self.admission.prompt_is_in(request.request_id)
                self.sharing.prompt_is_in(request.request_id)
            if not request.resumable:  # A session's later prompts have no arrival of their own.
                self.policy_stats.add_request(request, str(policy))
        super().add_request(request)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        # vLLM keeps what is computed, which the last token is not unless a step verified drafts.
        session.num_computed_tokens = min(session.num_computed_tokens, session.num_tokens - 1)
        session.spec_token_ids = []
        super()._update_request_as_session(session, update)
        _run_in_full(session, "its prompt has no end yet")

    def _choose_policy(self, request: Request) -> KVPolicy:
        """The policy that a new request runs under: its own, or `full` in its place.

        The server may be unable to run its own, as callers may bypass the API's check.
        """
        settings, policy, misfit = self.kv_settings, None, None
        try:
            policy = request_policy(settings, request.sampling_params)
            policy.check_composition()
            check_fits(policy, settings.layout, settings.num_layers)
            policy.check_length(request.num_prompt_tokens, self.max_model_len)
        except PolicyError as error:
            misfit = str(error)
        if request.resumable:
            if policy is None or not policy.is_full:
                self.policy_stats.add_run_in_full(RunInFull.SESSION)
            _run_in_full(request, "its prompt has no end yet")
        elif misfit is not None:
            self.policy_stats.add_run_in_full(RunInFull.MISFIT)
            _run_in_full(request, misfit)
        elif policy is not None:
            return policy
        return request_policy(settings, request.sampling_params)

    def _policy_of(self, request_id: str) -> KVPolicy:
        """The policy of a request that has not ended."""
        return self.first_stage_managers[0].requests[request_id].policy

    def _may_load(self, request: Request) -> bool:
        return self.handed_over.may_load(request, self._policy_of(request.request_id))

    def _tell_managers(self, request: Request, policy: KVPolicy) -> None:
        row = self.policy_stats.row_of(str(policy))
        storages = self.sharing.add_request(request, policy, row)
        self.admission.add_request(request, policy, storages)

    def _get_local_prefix_cache_hit(
        self, request: Request, *max_cache_hit_length: int | None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """No longer than the policy may share, nor than 0.33's own limit, if it gives one."""
        manager: Any = self.kv_cache_manager
        if self.handed_over.is_coming(request):
            self.sharing.pass_up(request)
            return manager.empty_kv_cache_blocks, 0, 0, False
        if not manager.prefix_cache_lookup_enabled(request):
            return super()._get_local_prefix_cache_hit(request, *max_cache_hit_length)
        policy = self._policy_of(request.request_id)
        limit = self.sharing.limit(request, policy)
        # A waiting request is looked up in every step, and again once preempted.
        if limit is None and request.request_id not in self._counted_unshared:
            self._counted_unshared.add(request.request_id)
            self.policy_stats.add_unshared(str(policy))
        if not limit:
            self.sharing.pass_up(request)
            return manager.empty_kv_cache_blocks, 0, 0, False
        limit = min([limit, *(most for most in max_cache_hit_length if most is not None)])
        return *self.sharing.find(request, limit), False

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # False makes vLLM pass over the request and go on; where its first chunk gets no tokens,
        # vLLM begins none of those behind it.
        has_loaded = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        is_ready = super()._handle_blocked_waiting_request(request)
        if has_loaded and not request.num_computed_tokens:
            # Its load failed, and its blocks are gone. It may need more of them now than came, and
            # those behind it hold them: passed over, it waits with the ones that hold none.
            is_ready = False
        num_left = len(self.kv_holding_waiting) + len(self.waiting)
        if self.admission.is_passed_over(request, is_ready, num_left):
            return False
        return self._adapter_slots.has_room(request, self.running)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        start, wanted = request.num_computed_tokens + num_new_local_computed_tokens, num_new_tokens
        if self.admission.coming:
            num_new_tokens = self.admission.clip(request, start, num_new_tokens)
        if self.resumed_rows:
            begin = start + num_external_computed_tokens
            num_new_tokens = self.resumed_rows.clip(request, begin, num_new_tokens, self.running)
        if self._has_states and num_new_tokens:
            computed = num_new_local_computed_tokens, num_external_computed_tokens
            aligned = super()._mamba_block_aligned_split(request, num_new_tokens, *computed)
            # No block ends in what is left of the prompt, of the tokens that retention waits for,
            # or of these before the window: then the chunk takes all that is left, even where
            # generated tokens follow, or ends in the window. It would never get there otherwise.
            if aligned == 0 and self.admission.has_to_end(request, start + num_new_tokens):
                aligned = num_new_tokens
            elif aligned == 0 and num_new_tokens < wanted:
                most = self.admission.within(request, start, start + wanted) - start
                aligned = super()._mamba_block_aligned_split(request, most, *computed)
            num_new_tokens = aligned
            if not self.admission.may_end(request, start + num_new_tokens):
                return 0
        end, running = start + num_new_tokens, self.running
        if self.sharing.step_room.is_early(request, end, running):
            return 0
        self.sharing.step_room.choose(request, end, running)
        return num_new_tokens

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], int, int, list[int], list[int]]:
        found = super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, *args, **kwargs
        )
        count = found[1]
        # A chunk then ends before an image for which the encoder has no room in this step. That
        # may be within the window.
        if 0 < count < num_new_tokens and self.admission.coming:
            count = self.admission.clip(request, num_computed_tokens, count)
        return found[0], count, *found[2:]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for request in self._to_shrink:
            self._shrink(request)
        self._to_shrink = []
        self.admission.new_step()
        self.resumed_rows.new_step()
        self._adapter_slots.new_step()
        # vLLM asks then where a chunk of a prompt may end; it does so for Mamba models alone.
        clips = self.admission.coming or self.resumed_rows
        self.need_mamba_block_aligned_split = self._has_states or bool(clips)
        output = super().schedule(*args, **kwargs)
        self.admission.settle(self.running)
        self._to_shrink = self.admission.past_prompt(output.num_scheduled_tokens)
        private = {
            request.request_id: blocks
            for request in self._to_shrink
            if any(blocks := self.sharing.private_blocks(request.request_id))
        }
        states = self.sharing.end_step(output.num_scheduled_tokens, self.requests)
        self._count_prefixes(output.num_scheduled_tokens, states)
        attach(output, PolicyStep(private, states, self.policy_stats.news(self.requests)))
        return output

    def _count_prefixes(self, scheduled: dict[str, int], states: dict[str, StateBlocks]) -> None:
        looked_up, self.sharing.looked_up = self.sharing.looked_up, {}
        self.sharing.begin_prompts(scheduled, self.requests)
        for request_id, (hit, cached) in looked_up.items():
            if request_id in scheduled and not self.requests[request_id].num_preemptions:
                policy = self._policy_of(request_id)
                self.policy_stats.add_prefix(str(policy), hit, cached)
        for request_id, blocks in states.items():
            if blocks.write:
                policy = self._policy_of(request_id)
                self.policy_stats.add_states(
                    str(policy), len(blocks.write) * self.sharing.state_tokens
                )

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

    def _shrink_what_is_handed_over(self) -> None:
        """Before a step's requests end, and the KV connector is told which blocks are theirs."""
        # Without a connector nobody is told, whatever a request asks for.
        for request in self._to_shrink if self.connector is not None else ():
            if is_to_hand_over(request):
                self._shrink(request)
                self._to_shrink = [r for r in self._to_shrink if r is not request]

    def _give_back(self, request_id: str, dropped: list[Mapping[int, KVCacheBlock]]) -> None:
        """Frees blocks that a request no longer needs: by KV group and place."""
        kv = self.first_stage_managers[0].requests.get(request_id)
        stays = None if kv is None else kv.stays
        blocks = in_turn_to_free(self.kv_cache_manager.block_pool, dropped, stays)
        # At once, unless a KV connector could write to them before a step that runs has read them.
        self._free_cow_retained_blocks(blocks, self.sched_step_seq)

    def update_from_output(self, scheduler_output: SchedulerOutput, output: Any) -> Any:
        self._shrink_what_is_handed_over()
        result = result_of(output)
        for request_id, kept in result.kept.items() if result is not None else ():
            request = self.requests.get(request_id)
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
        by_client = super().update_from_output(scheduler_output, output)
        if self.connector is not None:
            outputs = chain.from_iterable(each.outputs for each in by_client.values())
            tell(outputs, self.requests, self._policy_of)
            self.handed_over.first_tokens(self, by_client)
            for request in self.handed_over.failed(self):  # They compute their prompts themselves.
                self.admission.restart(request)
                self.sharing.restart(request.request_id)
        self.policy_stats.add_outputs(
            chain.from_iterable(each.outputs for each in by_client.values())
        )
        return by_client

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """By policy too, and the drafts alone that grammars did not rule out, as vLLM counts."""
        invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        policy = str(self._policy_of(request_id))
        self.policy_stats.add_drafts(policy, num_draft_tokens - invalid, num_accepted_tokens)
        return super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.sharing.keep_all(request.request_id)  # It is back soon.
        super()._preempt_request(request, *args, **kwargs)
        self.admission.restart(request)
        self.resumed_rows.restart(request, self._policy_of(request.request_id))
        self.sharing.restart(request.request_id)
        self._to_shrink = [r for r in self._to_shrink if r is not request]

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        # The first token of one whose entries have not come was told to nobody.
        self.policy_stats.end_request(request, not self.handed_over.is_coming(request))
        self._counted_unshared.discard(request.request_id)
        self.admission.remove_request(request.request_id)
        self.resumed_rows.remove_request(request.request_id)
        self.sharing.remove_request(request.request_id)
        self.handed_over.remove_request(request.request_id)
        self._to_shrink = [r for r in self._to_shrink if r is not request]
        every = *self.first_stage_managers, *self.later_stage_managers, *self._sliding_managers
        for manager in every:
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
