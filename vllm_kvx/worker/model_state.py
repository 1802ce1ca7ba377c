"""vLLM's hooks into a step: lengths, slots and rows of every KV stage, and the passes to run.

``preprocess_state`` runs on real batches only, after vLLM gathered the block tables; it rewrites
slots and lengths on the device and plans the step on the host. ``prepare_attn`` then builds each
stage's attention metadata and hands the passes to the model. Nothing is read back from the device.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.states import RequestState

from vllm_kvx.cache.admission import num_split_windows
from vllm_kvx.cache.pool_capacity import VLLMS_OWN, layer_spec, stage_of
from vllm_kvx.config.settings import KVSettings, request_policy
from vllm_kvx.models.attention import check_softmax
from vllm_kvx.models.decoder import SegmentedModel
from vllm_kvx.models.hooked import HookedModel
from vllm_kvx.models.passes import AttnMetadata, StepPlan
from vllm_kvx.ops.slots import map_slots
from vllm_kvx.worker.adapters import Adapters
from vllm_kvx.worker.attn_metadata import StepAttention
from vllm_kvx.worker.blocks import cut_tables, relink, show_by_slots, take_private
from vllm_kvx.worker.decode.retrieval import Retrieval
from vllm_kvx.worker.decode.step import Mode, RetrievalPass, graph_modes
from vllm_kvx.worker.layer_hooks import LayerHooks
from vllm_kvx.worker.prefill.lookahead import Draft
from vllm_kvx.worker.prefill.online_pivot import OnlinePasses
from vllm_kvx.worker.prefill.prefix_states import PrefixStates
from vllm_kvx.worker.prefill.score_and_move import PrefillBuffers
from vllm_kvx.worker.prefill.selected_passes import PassMaker, run_in_turn
from vllm_kvx.worker.prefill.stash import Stash
from vllm_kvx.worker.requests import Requests
from vllm_kvx.worker.rows import DeviceRows
from vllm_kvx.worker.shared_attn_metadata import AttentionGroups, SharedAttnMetadata, only
from vllm_kvx.worker.split_layers import Cuts, cuts_of
from vllm_kvx.worker.stages import set_specs
from vllm_kvx.worker.stats import PolicyStats
from vllm_kvx.worker.step import Step, check_blocks, ends_of, needs_python, of_stage, plan_step
from vllm_kvx.worker.waiting_queries import WaitingQueries


class PolicyModelState(DefaultModelState):
    """``DefaultModelState`` whose KV stages have lengths, slots and rows of their own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: EncoderCache | None,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        settings = KVSettings.from_vllm_config(vllm_config)
        assert settings is not None
        self.settings, layout = settings, settings.layout
        self.checks_blocks = settings.debug
        self.hooked, self.starts = cast(HookedModel, model), layout.stage_starts
        dtype, attention = cast(torch.dtype, self.dtype), self.hooked.attention_layers()
        computes = bool(layout.window or layout.sidecar)
        check_softmax(self.hooked.every_layer(), computes, layout.retain or layout.propagates)
        if isinstance(model, SegmentedModel):
            model.weights_are_loaded()
        first, num_layers, stages = set_specs(self.hooked, vllm_config, settings)
        self.cuts = cuts_of(layout, self.hooked.every_layer(), vllm_config)
        if num_layers > len(attention):  # All layers of a pipeline's rank run the same rows.
            self.cuts = Cuts((first,), frozenset())
        # The segment of the decoder that each KV stage begins in.
        self.stage_segments = [self.cuts.segment_of(stage.start) for stage in layout.stages]
        self.hooks = LayerHooks(self.hooked, stages, dtype, layout, first)
        num_windows = num_split_windows(settings, vllm_config.scheduler_config)
        waits = any(policy.num_generated for policy in settings.policies)
        policies = settings.counted_policies()
        sizes = [stages.count(stage) for stage in range(len(self.starts))]
        rule = layout.retrieving
        parts = rule.in_stages(self.starts, num_layers)
        self.stats = PolicyStats(sizes, policies, len(self.hooks.names), first, rule, parts)
        self.memory = PrefillBuffers(
            attention, num_windows, layout.window, dtype, device, policies.size, waits
        )
        self.waiting = WaitingQueries(self.memory, self.max_num_tokens)
        self.stash: Stash | None = None
        if layout.stash:
            hidden = self.model_config.get_hidden_size()
            self.stash = Stash(settings.stash_tokens, hidden, dtype, device)
        self.requests = Requests(
            layout, self.cuts, settings.num_layers, self.max_num_reqs, num_windows, self.stash
        )
        # By stage, in batch order; at a fixed address for CUDA graphs.
        self.stored_lens = torch.zeros(
            len(layout.stages), self.max_num_reqs, dtype=torch.int32, device=device
        )
        self.retrieval: Retrieval | None = None
        if layout.sidecar is not None:
            self.retrieval = Retrieval(
                settings,
                layout.sidecar,
                self.hooks.layers,
                graph_modes(settings.may_retrieve(), self.starts),
                vllm_config,
                device,
                policies.size,
                num_layers,
            )
            self.hooks.retrieval = self.retrieval
        self.adapters = Adapters(model, self.max_num_reqs)
        self.draft: Draft | None = None
        self.attention: StepAttention | None = None  # Of the real step that runs.
        self._step: Step | None = None

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self.block_tables, self.kv_cache_config = block_tables, kv_cache_config
        groups = kv_cache_config.kv_cache_groups
        self.shared = SharedAttnMetadata(groups, super().prepare_attn)
        self.group_stages = [stage_of(layer_spec(group))[0] for group in groups]
        ours = [g for g, stage in enumerate(self.group_stages) if stage != VLLMS_OWN]
        show_by_slots(block_tables, ours)
        self._vllms_own = [g for g in range(len(groups)) if g not in ours]
        self._first_group, stages = ours[0], [self.group_stages[g] for g in ours]
        self._groups = torch.tensor(ours, dtype=torch.int32, device=self.device)
        self._stages = torch.tensor(stages, dtype=torch.int32, device=self.device)
        self.hooks.bind(kv_cache_config, self.settings.layout)
        if self.retrieval is not None:
            spec = layer_spec(groups[self._first_group])
            assert isinstance(spec, AttentionSpec)
            self.retrieval.bind(spec, block_tables)
        self.prefix_states = PrefixStates.of(
            self.stash, kv_cache_config, self.vllm_config, self.hooks
        )
        self.passes = PassMaker(
            self.hooks,
            self.memory,
            self.stash,
            self.cuts,
            self.starts,
            self.group_stages,
            block_tables.block_sizes,
            self.max_num_tokens,
        )

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        policy = request_policy(self.settings, new_req_data.sampling_params)
        prompt_len, req_id = new_req_data.prompt_len, new_req_data.req_id
        row, size = self.stats.row_of(policy), self.block_tables.block_sizes[self._first_group]
        done = new_req_data.num_computed_tokens
        is_in = self.requests.add(req_index, req_id, policy, prompt_len, size, row, done)
        self.adapters.add_request(req_index, new_req_data.lora_request)
        if self.retrieval is not None:
            self.retrieval.add_request(req_index, policy.retrieve, row)
        if is_in or len(new_req_data.prefill_token_ids or ()) == prompt_len:  # It does not resume.
            self.stats.requests[row] += 1

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self.requests.remove(req_id)

    # Steps, in the order in which vLLM calls.

    def needs_python(self, requests: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> bool:
        """See ``step.needs_python``."""
        keeps = self.waiting.in_graphs
        return needs_python(self.requests, self.retrieval, keeps, requests, begins, counts)

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: Tensor,
    ) -> None:
        super().preprocess_state(input_batch, block_tables, kv_cache_config, num_computed_tokens)
        requests, tables = self.requests, self.block_tables
        if requests.has_growing_gaps:
            requests.grow_gaps(input_batch.idx_mapping_np, ends_of(input_batch))
        requests.turn_gaps(input_batch.idx_mapping_np, input_batch.num_computed_tokens_np)
        requests.copy_gaps()
        map_slots(
            self._groups,
            self._stages,
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            input_batch.positions,
            input_batch.seq_lens,
            requests.gap_starts.gpu,
            requests.gap_sizes.gpu,
            tables.block_table_ptrs,
            tables.block_table_strides,
            tables.block_sizes_tensor,
            tables.slot_mappings,
            self.stored_lens,
            input_batch.num_reqs_after_padding,
        )
        self._step = step = plan_step(input_batch, requests, self.retrieval, self.memory.private)
        self.prefix_states.restore()
        if self.checks_blocks:
            config = self.vllm_config
            ahead = config.num_speculative_tokens + config.num_lookahead_tokens
            check_blocks(step, self.group_stages, tables, len(self.starts), ahead)
        for chunk in step.chunks:
            if chunk.is_last:
                # From the next step on; what this one reads was copied to the device before.
                index, state = int(step.requests[chunk.batch_index]), chunk.state
                requests.compact(index, state.storages)
                freed = cut_tables(tables, index, state.cut_to, self.group_stages)
                self.stats.blocks_freed[state.stats_row] += freed

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[Tensor, ...],
        slot_mappings: Tensor,
        attn_groups: AttentionGroups,
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        ubatch_idx: int = 0,
        model_specific_attn_metadata: ModelSpecificAttnMetadata | None = None,
    ) -> AttnMetadata:
        # None for a dummy batch, which no preprocess_state preceded.
        step = self._step if self._step is not None and self._step.batch is input_batch else None
        self._step = None
        attn = StepAttention(
            self.shared,
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            (kv_cache_config, for_capture, ubatch_idx, model_specific_attn_metadata),
            self.max_num_reqs,
            self.settings.layout.drafts_ahead,
        )
        self.attention = None if step is None else attn
        rows, counts = self._rows(step, attn)
        keeps = self.waiting.beside(step, cudagraph_mode, attn.size[0], for_capture)
        retrieves = self._retrieval_pass(step, attn, for_capture)
        metadata = self._by_stage(step, attn, rows, retrieves)
        if step is None:
            plan = StepPlan(hooks=self.hooks.during(keeps, retrieves), is_dummy=True)
        elif step.is_decode:
            plan = StepPlan(hooks=self.hooks.during(None, retrieves))
            self.stats.add_decodes(step, self.requests)
        else:
            if keeps is not None:
                plan = StepPlan(hooks=self.hooks.during(keeps, retrieves))
            else:
                plan = self._plan(step, attn, metadata, rows, counts, retrieves)
            sizes = [last - first for first, last in self.passes.segments]
            self.stats.add_step(step, self.requests, zip(sizes, counts, strict=True))
            self.draft = Draft.of(step.chunks, attn, self.memory, self.block_tables.block_sizes)
            self.requests.end_prompts(step.requests, step.chunks)
        self.hooked.begin_step(plan)
        return metadata

    def prepare_inputs(
        self, input_batch: InputBatch, req_states: RequestState
    ) -> dict[str, Tensor | None]:
        # vLLM asks before there is a KV cache, too.
        self.memory.token_ids = req_states.all_token_ids.gpu
        return super().prepare_inputs(input_batch, req_states)

    def after_forward(self) -> None:
        """Once the step's forward pass is queued: tables of what moved, sidecars of what is new."""
        self.prefix_states.save()
        sidecars = self.retrieval.sidecars if self.retrieval is not None else None
        if sidecars is not None:
            sidecars.write_left_behind()
        take_private(self.block_tables, self.memory.private, self.requests.index)
        if sidecars is not None:
            sidecars.write()

    def relink_blocks(self) -> dict[str, dict[int, np.ndarray]]:
        """After the forward pass: by request and stage, which blocks stay; see ``relink``."""
        chosen = self.memory.centrality.take_blocks()
        return relink(self.block_tables, chosen, self.requests.index, self.group_stages)

    def _rows(
        self, step: Step | None, attn: StepAttention
    ) -> tuple[list[DeviceRows | None], list[np.ndarray]]:
        """By segment of the decoder, the rows that it runs and how many each request has.

        None stands for all rows. A FULL graph runs all of the batch: they are decodes or one-token
        chunks, for which slots and lengths alone are exact (``needs_python`` keeps others away).
        """
        num_segments = len(self.passes.segments)
        if step is None:
            return [None] * num_segments, [np.zeros(0, dtype=np.int64)] * num_segments
        if attn.mode == CUDAGraphMode.FULL:
            return [None] * num_segments, [step.counts] * num_segments
        rows = [
            None
            if r is None
            else DeviceRows.of(r, attn.batch, attn.block_tables, attn.slot_mappings, self.device)
            for r in step.rows
        ]
        return rows, [step.counts if r is None else r.counts for r in step.rows]

    def _by_stage(
        self,
        step: Step | None,
        attn: StepAttention,
        rows: Sequence[DeviceRows | None],
        retrieves: RetrievalPass | None,
    ) -> AttnMetadata:
        """Metadata of all layers, each with its stage's lengths; rows: by segment."""
        metadata: AttnMetadata = {}
        if self._vllms_own:  # As vLLM would have it: whole contexts, by position.
            metadata.update(attn.stock(only(attn.attn_groups, self._vllms_own)))
        for stage, stored_lens in enumerate(self.stored_lens):
            batch = of_stage(attn.batch, stage, stored_lens, step)
            groups = only(attn.attn_groups, self.passes.groups_of(stage))
            cut = rows[self.stage_segments[stage]]
            metadata.update(attn.of_rows(batch, groups, cut))
            if retrieves is not None and retrieves.modes[stage] is Mode.MIXED:
                assert self.retrieval is not None
                retrieval_step = step.retrieval if step is not None else None
                batch, groups = self.retrieval.stock_batch(
                    retrieval_step, stage, batch, groups, attn.attn_groups
                )
                metadata.update(attn.of_rows(batch, groups, cut))
        return metadata

    def _plan(
        self,
        step: Step,
        attn: StepAttention,
        metadata: AttnMetadata,
        rows: Sequence[DeviceRows | None],
        counts: Sequence[np.ndarray],
        retrieves: RetrievalPass | None,
    ) -> StepPlan:
        """What the forward pass of a real step runs."""
        if step.chunks:
            self.memory.timer.collect()
            self.memory.detector_timer.collect()
        here = attn.step_batch(step, metadata, retrieves is not None)
        if all(cut is None for cut in rows) and step.projected is None:
            work = self.passes.work(step.chunks, here, step.counts) if step.chunks else None
            return StepPlan(hooks=self.hooks.during(work, retrieves))
        direct = self.passes.direct(here, step.chunks, rows, counts, retrieves)
        resumed = self.passes.resumed(here, step.chunks, direct)
        online = OnlinePasses(self.passes, step.online, here, self.stats.add_pivot)
        passes = run_in_turn(direct, resumed, online())
        return StepPlan(passes, self.adapters.of_step(step))

    def _retrieval_pass(
        self, step: Step | None, attn: StepAttention, for_capture: bool
    ) -> RetrievalPass | None:
        retrieval, tables = self.retrieval, attn.block_tables
        if retrieval is None:
            return None
        if step is None:
            return retrieval.graph_pass(None, attn.size, tables) if for_capture else None
        plan = step.retrieval
        assert plan is not None
        if attn.mode == CUDAGraphMode.FULL:
            now = retrieval.graph_pass(plan, attn.size, tables, self.waiting.keeps, attn.late)
        else:
            now = retrieval.eager_pass(
                plan,
                step.counts,
                [step.rows[segment] for segment in self.stage_segments],
                step.ends,
                self.requests.prompt_lens[step.requests],
                step.gaps,
                tables,
                self.cuts.at_split_layers(step.rows),
                attn.late,
            )
        self.stats.add_retrieval_step(step, self.requests, retrieval.layout.unit, now)
        return now

    def reset_counters(self) -> None:
        """Forgets what was counted: vLLM's own requests, by which it warms up."""
        self.stats = self.stats.anew(self.settings.counted_policies())
        self.memory.reset_counters()
        if self.retrieval is not None:
            self.retrieval.reset_counters()


class PolicyHybridModelState(PolicyModelState, MambaHybridModelState):
    """The same of a model some of whose layers keep a state, which vLLM moves along."""
