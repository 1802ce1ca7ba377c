"""Workers that load the model with our hooks; everything else is vLLM's."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvx.cache.draft_slots import reserve_slots
from vllm_kvx.cache.messages import PolicyResult, PolicyStep, attach_result, step_of
from vllm_kvx.compat.vllm_signatures import check_engine
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.models.hooked import Build
from vllm_kvx.models.registry import use_policy_model
from vllm_kvx.ops.prompt.metrics_scratch import scratch_bytes
from vllm_kvx.worker.adapters import EveryLogit
from vllm_kvx.worker.attention_backend import choosing_usable
from vllm_kvx.worker.batch import to_device
from vllm_kvx.worker.decode.alike import check_alike
from vllm_kvx.worker.draft_room import widen_compiled_range
from vllm_kvx.worker.graph_sets import capture_sets
from vllm_kvx.worker.handed_over import hand_over_entries
from vllm_kvx.worker.int8_cache.room import read_all, room_of
from vllm_kvx.worker.model_state import PolicyHybridModelState, PolicyModelState
from vllm_kvx.worker.prefill.lookahead import Draft, run_draft
from vllm_kvx.worker.row_graphs import capture_row_graphs
from vllm_kvx.worker.row_passes import RowPasses
from vllm_kvx.worker.self_drafter import SelfDrafter
from vllm_kvx.worker.sleep import SleepingBuffers
from vllm_kvx.worker.split_layers import cuts_of
from vllm_kvx.worker.status import stats_of
from vllm_kvx.worker.triton_precompile import CompilesAhead
from vllm_kvx.worker.warm_up import warm_up

# A mixin's `self` is one of vLLM's workers, which only a type checker has to know.
if TYPE_CHECKING:
    _Base = Worker
else:
    _Base = object


class _PolicyWorking(_Base):
    """Mixin over vLLM's workers."""

    # vLLM names the class of Model Runner V1 here; ours is V2.
    model_runner: Any
    _kept_blocks: dict[str, dict[int, np.ndarray]]
    _sleeping: SleepingBuffers
    _asleep_stats: dict[str, Any] | None
    # Where steps verify drafts beside LoRA adapters.
    _every_logit: EveryLogit | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        check_engine(type(self))
        config = self.vllm_config
        settings = KVSettings.from_vllm_config(config)
        assert settings is not None
        layout = settings.layout
        if settings.drafts is not None:
            reserve_slots()

        is_hybrid = config.model_config.is_hybrid
        model_state = PolicyHybridModelState if is_hybrid else PolicyModelState

        def row_cuts(attention: Any) -> tuple[int, ...]:
            return cuts_of(layout, attention, config).firsts[1:]

        build = Build(model_state, row_cuts, layout.online_cuts)
        in_pipeline = config.parallel_config.pipeline_parallel_size > 1
        use_policy_model(config.model_config, build, layout.propagates, in_pipeline)
        with choosing_usable(layout):
            super().load_model(*args, **kwargs)
        widen_compiled_range(config)
        runner = self.model_runner
        if layout.propagates and not in_pipeline:
            # Not before vLLM has set experts up, which is the last thing that it does.
            ended = layout.later_starts[0] if layout.projects else settings.num_layers
            with set_current_vllm_config(config), set_forward_context(None, config):
                runner.model_state.hooked.check_ranges(range(ended, settings.num_layers))
        self._sleeping, self._asleep_stats = SleepingBuffers(), None
        if layout.online_cuts:
            attention = runner.model_state.hooks.layers[0].layer
            runner.model_state.hooks.scratch_bytes = scratch_bytes(
                layout.window,
                runner.max_num_reqs,
                attention.num_kv_heads,
                attention.num_heads // attention.num_kv_heads,
                config.model_config.max_model_len,
            )
        hooks = runner.model_state.hooks
        hooks.scratch_bytes += sum(hook.carried_bytes for hook in hooks.windows)
        layers = [hook.layer for hook in hooks.layers]
        hooks.scratch_bytes += room_of(layers, hooks.dtype, config)
        if (retrieval := runner.model_state.retrieval) is not None:
            check_alike(retrieval, hooks.layers)
            hooks.kept += read_all(layers, retrieval.scratch, config.model_config.max_model_len)
        _keep_prompts_off_graphs(runner)
        capture_sets(runner, runner.model_state.retrieval, runner.model_state.waiting)
        if runner.model_state.retrieval is not None or not layout.keeps_prompts:
            hand_over_entries(runner, layout)
        if layout.lookahead or layout.own_drafts:
            capture_row_graphs(runner, settings)
        if settings.drafts is not None:
            runner.speculator = SelfDrafter(runner, settings.drafts)
        if config.lora_config is not None and config.speculative_config is not None:
            self._every_logit = EveryLogit(runner.lora_state)

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        self._save_buffers()
        super().sleep(*args, **kwargs)

    def discard(self, tags: tuple[str, ...]) -> None:
        if "weights" in tags:
            self._save_buffers()
        super().discard(tags)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if tags is None or "weights" in tags:
            self._sleeping.restore()
            self._asleep_stats = None

    def _save_buffers(self) -> None:
        # What counts on the device cannot be read there until it is back.
        if self._asleep_stats is None:
            self._asleep_stats = self.kv_policy_stats()
        self._sleeping.save(self.model_runner.model_state)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        super().reload_weights(*args, **kwargs)
        self._weights_are_new()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._weights_are_new()

    def _weights_are_new(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.model_state.hooks.read_weights()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.model_state.reset_counters()
        if isinstance(self.model_runner.speculator, SelfDrafter):
            self.model_runner.speculator.drafts_anyway = False
        return times

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts, drafter = super().take_draft_token_ids(), self.model_runner.speculator
        if drafts is not None and isinstance(drafter, SelfDrafter):
            return drafter.those_drafted(drafts)
        return drafts

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        state: PolicyModelState = self.model_runner.model_state
        step = step_of(scheduler_output) or PolicyStep()
        if step.stats is not None:
            state.stats.scheduler = step.stats
        state.memory.private = step.private
        state.prefix_states.in_step = step.states
        state.draft = None
        if self._every_logit is not None:
            self._every_logit.drafts = scheduler_output.scheduled_spec_decode_tokens
        output = super().execute_model(scheduler_output, *args, **kwargs)
        if state.draft is not None:
            self._run_draft(state.draft)
        state.after_forward()
        self._kept_blocks = state.relink_blocks()
        return output

    @torch.inference_mode()
    def _run_draft(self, draft: Draft) -> None:
        runner = self.model_runner
        done, passes = runner.execute_model_state, RowPasses(runner)
        if passes.may_overwrite_states:
            done = done._replace(hidden_states=done.hidden_states.clone())
            runner.execute_model_state = done
        # One token of each request is sampled, of its last row.
        rows = done.input_batch.logits_indices[to_device(draft.places, runner.device)]
        run_draft(draft, passes, done.hidden_states[rows])

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        kept, self._kept_blocks = self._kept_blocks, {}
        if kept and output is not None:
            # The output's own copies, queued after these, are waited for in `get_output`.
            stock = output.get_output

            def get_output() -> Any:
                result = stock()
                lists = {
                    request: {stage: blocks.tolist() for stage, blocks in by_stage.items()}
                    for request, by_stage in kept.items()
                }
                attach_result(result, PolicyResult(lists))
                return result

            output.get_output = get_output
        return output

    def kv_policy_stats(self) -> dict[str, Any]:
        """Layout and cumulative counters of this rank, for metrics and the status route.

        While vLLM sleeps they are those of before: nothing is computed, and a scrape may come.
        """
        if self._asleep_stats is not None:
            return self._asleep_stats
        return stats_of(self.model_runner.model_state)


def _keep_prompts_off_graphs(runner: Any) -> None:
    """No FULL CUDA graph for a step with a prompt that is scored or stashed.

    vLLM runs a chunk of one token as a decode, and a graph would replay past what has to happen
    beside its layers.
    """
    stock = runner.gather_batch_req_state

    def gather_batch_req_state(scheduler_output: Any, dummy_run: bool) -> tuple[Any, int | None]:
        state, uniform = stock(scheduler_output, dummy_run)
        if state is not None:
            requests = state.idx_mapping_np
            begins = runner.req_states.num_computed_tokens_np[requests]
            if runner.model_state.needs_python(requests, begins, state.num_scheduled_tokens):
                return state._replace(decode_graph_eligible=False), None
        return state, uniform

    runner.gather_batch_req_state = gather_batch_req_state


class PolicyWorker(_PolicyWorking, Worker):
    """GPU worker under a KV policy."""

    _ahead: CompilesAhead | None = None

    def compile_or_warm_up_model(self) -> Any:
        if self.vllm_config.kernel_config.enable_jit_warmup:
            # The layers have their caches, and vLLM's own kernels and graphs take a while.
            runner: Any = self.model_runner
            self._ahead = CompilesAhead.of(runner.model_state)
        try:
            return super().compile_or_warm_up_model()
        finally:
            # Where that failed, the thread would hold the cache of an engine that is gone.
            if self._ahead is not None:
                self._ahead.wait()

    def _maybe_activate_jit_monitor(self) -> None:
        # From here on vLLM calls a kernel that is compiled a surprise.
        if self.vllm_config.kernel_config.enable_jit_warmup:
            if self._ahead is not None:
                self._ahead.wait()
            runner: Any = self.model_runner
            warm_up(runner, self.execute_model, self.sample_tokens, runner.model_state.settings)
        super()._maybe_activate_jit_monitor()
