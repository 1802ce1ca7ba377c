"""Device side of a policy: lengths, slots and rows of every segment, each step.

``preprocess_state`` runs on real batches only, after vLLM gathered the block tables; it rewrites
slots and lengths on device and plans the rows on the host. ``prepare_attn`` then builds the
attention metadata of each segment from its own lengths and rows, and hands the rows to the
model. Counts are known on the host throughout: nothing is read back from the device.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_kvx.cache.admission import num_split_windows
from vllm_kvx.cache.pool import pool_tokens, segment_of
from vllm_kvx.models.decoder import SegmentedModel, StepPlan, StepRows
from vllm_kvx.ops.slots import map_slots
from vllm_kvx.policy import storage as accounting
from vllm_kvx.server.refusals import ATTENTION_BACKENDS, NO_SIDECAR
from vllm_kvx.settings import KVSettings, request_policy
from vllm_kvx.worker.decode.retrieval import (
    Mode,
    Retrieval,
    RetrievalPass,
    RetrievalStep,
    graph_modes,
)
from vllm_kvx.worker.prefill.chunks import PromptChunk, PromptState
from vllm_kvx.worker.prefill.online_pivot import OnlinePasses
from vllm_kvx.worker.prefill.passes import PromptPasses, SelectedBatch
from vllm_kvx.worker.prefill.stash import Stash
from vllm_kvx.worker.rows import SegmentRows, plan_rows
from vllm_kvx.worker.stats import PolicyStats


@dataclass
class _Step:
    """A real batch between ``preprocess_state`` and ``prepare_attn``.

    Attributes:
        batch: the batch itself, which dummy batches are not.
        requests: (R,) request-state indices.
        begins, counts: (R,) int64 first position and tokens of each request.
        plan: rows of every segment; None runs all.
        stored_lens: (S, R) stored lengths in all segments, this step's tokens included.
        chunks: prompts in the step that are scored, selected from or compacted.
        gaps: (S, R) starts and sizes of the gaps in force.
        retrieval: on a server that retrieves.
    """

    batch: InputBatch
    requests: np.ndarray
    begins: np.ndarray
    counts: np.ndarray
    plan: list[SegmentRows | None]
    stored_lens: accounting.IntArray
    chunks: list[PromptChunk]
    gaps: tuple[accounting.IntArray, accounting.IntArray]
    retrieval: RetrievalStep | None = None

    @property
    def ends(self) -> np.ndarray:
        return self.begins + self.counts


class PolicyModelState(DefaultModelState):
    """``DefaultModelState`` whose later segments have lengths, slots and rows of their own."""

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
        self.settings = settings
        self.segmented = cast(SegmentedModel, model)
        self.segment_starts = (0, *settings.layout.splits)
        self.segment_sizes = np.diff(np.array([*self.segment_starts, settings.num_layers]))
        num_segments = len(self.segment_starts)

        # By segment and request state: the gap in force. The host copy is the source of truth.
        self.gap_starts = UvaBackedTensor((num_segments, self.max_num_reqs), dtype=torch.int32)
        self.gap_sizes = UvaBackedTensor((num_segments, self.max_num_reqs), dtype=torch.int32)
        self._gaps_changed = True
        self.prompt_lens = np.zeros(self.max_num_reqs, dtype=np.int32)
        self.policy_rows = np.zeros(self.max_num_reqs, dtype=np.int64)
        self.seq_lens = np.zeros(self.max_num_reqs, dtype=np.int64)
        # By segment, in batch order; at a fixed address for CUDA graphs.
        self.stored_lens = torch.zeros(
            num_segments, self.max_num_reqs, dtype=torch.int32, device=device
        )
        self.stash: Stash | None = None
        if settings.layout.stash:
            hidden = self.model_config.get_hidden_size()
            self.stash = Stash(settings.stash_tokens, hidden, cast(torch.dtype, self.dtype), device)
        self._free_slots = list(range(num_split_windows(settings, vllm_config.scheduler_config)))
        self.retrieval: Retrieval | None = None
        if settings.layout.sidecar is not None:
            self.retrieval = Retrieval(
                settings.layout.sidecar,
                self.segmented.taps.layers,
                graph_modes(settings.policy, self.segment_starts),
                vllm_config,
                settings.recall_every,
                device,
            )
            self.segmented.taps.retrieval = self.retrieval
        self.stats = PolicyStats(self.segment_sizes)
        self._req_index: dict[str, int] = {}
        # Prompts that are coming in, by request-state index.
        self._prompts: dict[int, PromptState] = {}
        self._step: _Step | None = None

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self.block_tables = block_tables
        self.kv_cache_config = kv_cache_config
        self.group_segments = [
            segment_of(group.kv_cache_spec)[0] for group in kv_cache_config.kv_cache_groups
        ]
        for group, block_size in enumerate(block_tables.block_sizes):
            wanted = kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
            if block_size != wanted:
                raise RuntimeError(
                    f"KV group {group} has blocks of {wanted} tokens, its attention kernel of "
                    f"{block_size}: set --block-size {block_size}"
                )
        groups = len(self.group_segments)
        self._groups = torch.arange(groups, dtype=torch.int32, device=self.device)
        self._segments = torch.tensor(self.group_segments, dtype=torch.int32, device=self.device)
        names = {
            name: group
            for group, spec in enumerate(kv_cache_config.kv_cache_groups)
            for name in spec.layer_names
        }
        taps = self.segmented.taps
        for tap in taps.layers:
            backend = tap.layer.attn_backend.get_name()
            layout = self.settings.layout
            scores = layout.retain or layout.window or layout.sidecar
            known = [
                name for name in ATTENTION_BACKENDS if not (layout.sidecar and name in NO_SIDECAR)
            ]
            if scores and backend not in known:
                raise RuntimeError(
                    f"retention and retrieval do not know how attention backend {backend} lays out "
                    f"keys, or it leaves no room beside them: set --attention-backend to one of "
                    f"{', '.join(known)}"
                )
            tap.group = names[tap.layer.layer_name]
        if self.retrieval is not None:
            spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
            assert isinstance(spec, AttentionSpec)
            self.retrieval.bind(spec, block_tables)
        self._passes = PromptPasses(
            taps, self.stash, self.group_segments, block_tables.block_sizes, self.max_num_tokens
        )

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        policy = request_policy(self.settings, new_req_data.sampling_params)
        prompt_len = new_req_data.prompt_len
        req_id = new_req_data.req_id
        block_size = self.block_tables.block_sizes[0]
        for segment, start_layer in enumerate(self.segment_starts):
            gap = accounting.storage_of(
                policy, prompt_len, start_layer, block_size, self.settings.num_layers
            ).prefill
            self.gap_starts.np[segment, req_index] = gap.start
            self.gap_sizes.np[segment, req_index] = gap.size
        self._gaps_changed = True
        prompt = PromptState.of(
            req_id, policy, prompt_len, self.segment_starts, block_size, self.settings.num_layers
        )
        if prompt is not None:
            self._prompts[req_index] = prompt
            if prompt.first_selected is not None or prompt.online is not None:
                assert self.stash is not None
                self.stash.take(req_id, prompt_len)
        self.prompt_lens[req_index] = prompt_len
        self.seq_lens[req_index] = 0
        if self.retrieval is not None:
            self.retrieval.add_request(req_index, policy.retrieve)
        row = self.policy_rows[req_index] = self.stats.row_of(policy)
        if prompt is not None:
            prompt.stats_row = row
        if len(new_req_data.prefill_token_ids or ()) == prompt_len:  # Not one that resumes.
            self.stats.requests[row] += 1
        self._req_index[req_id] = req_index

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        index = self._req_index.pop(req_id, None)
        if index is not None:
            self._prompt_is_over(index)

    def _prompt_is_over(self, req_index: int) -> None:
        prompt = self._prompts.pop(req_index, None)
        if prompt is None:
            return
        if self.stash is not None:
            self.stash.release(prompt.req_id)
        if prompt.slot is not None:
            self._free_slots.append(prompt.slot)

    def needs_python(self, requests: np.ndarray) -> bool:
        """Whether a step with these requests does more than a CUDA graph of decodes replays."""
        if bool(self._prompts) and any(i in self._prompts for i in requests.tolist()):
            return True
        if self.retrieval is None:
            return False
        ends = self.seq_lens[requests] + 1
        gaps = self.gap_starts.np[:, requests], self.gap_sizes.np[:, requests]
        return self.retrieval.needs_python(
            requests, ends, self.prompt_lens[requests], accounting.stored_lens(ends, *gaps)
        )

    def after_forward(self) -> None:
        """Once the step's forward pass is queued: sidecars of what it stored."""
        if self.retrieval is not None:
            self.retrieval.sidecars.write()

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        super().preprocess_state(input_batch, block_tables, kv_cache_config, num_computed_tokens)
        tables = self.block_tables
        if self._gaps_changed:
            self._gaps_changed = False
            self.gap_starts.copy_to_uva()
            self.gap_sizes.copy_to_uva()
        map_slots(
            self._groups,
            self._segments,
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            input_batch.positions,
            input_batch.seq_lens,
            self.gap_starts.gpu,
            self.gap_sizes.gpu,
            tables.block_table_ptrs,
            tables.block_table_strides,
            tables.block_sizes_tensor,
            tables.slot_mappings,
            self.stored_lens,
            input_batch.num_reqs_after_padding,
        )
        requests = input_batch.idx_mapping_np
        begins = input_batch.num_computed_tokens_np.astype(np.int64)
        counts = input_batch.num_scheduled_tokens[: input_batch.num_reqs].astype(np.int64)
        gap_starts = self.gap_starts.np[:, requests]
        gap_sizes = self.gap_sizes.np[:, requests]
        ends = begins + counts
        chunks = self._chunks(requests, begins, ends)
        online = [chunk.batch_index for chunk in chunks if chunk.state.online is not None]
        row_starts, row_sizes = gap_starts, gap_sizes
        if online:  # They run on their own, so the pass of all others leaves them out.
            row_starts, row_sizes = gap_starts.copy(), gap_sizes.copy()
            row_starts[:, online], row_sizes[:, online] = 0, self.prompt_lens[requests[online]]
        self._step = step = _Step(
            input_batch,
            requests,
            begins,
            counts,
            plan_rows(begins, counts, row_starts, row_sizes),
            accounting.stored_lens(ends, gap_starts, gap_sizes),
            chunks,
            (gap_starts, gap_sizes),
        )
        if self.retrieval is not None:
            step.retrieval = self._plan_retrieval(self.retrieval, step)
        self.seq_lens[requests] = ends
        if self.settings.debug:
            self._check_blocks(step, ends)
        for chunk in step.chunks:
            if chunk.is_last:
                self._compact_tables(int(requests[chunk.batch_index]), chunk.state)

    def _plan_retrieval(self, retrieval: Retrieval, step: _Step) -> RetrievalStep:
        before = accounting.stored_lens(step.begins, *step.gaps)
        after = step.stored_lens.copy()
        moved = np.zeros(after.shape, dtype=bool)
        for chunk in step.chunks:
            if not chunk.is_last:
                continue
            state, i = chunk.state, chunk.batch_index
            # Whole blocks take their sidecars along when they are re-linked.
            after[:, i] = [s.rows if state.by_block else s.kept for s in state.storages]
            moved[:, i] = state.online is not None or [
                s.compacts and not state.by_block for s in state.storages
            ]
        is_fresh = retrieval.sidecars.is_fresh(step.requests)
        retrieval.sidecars.plan(step.requests, before, after, moved)
        return retrieval.plan(
            step.requests,
            step.begins,
            step.counts,
            self.prompt_lens[step.requests],
            step.stored_lens,
            is_fresh,
        )

    def _chunks(
        self, requests: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> list[PromptChunk]:
        chunks = []
        for i, index in enumerate(requests.tolist() if self._prompts else ()):
            prompt = self._prompts.get(index)
            if prompt is None:
                continue
            chunk = PromptChunk(prompt, i, int(begins[i]), int(ends[i]))
            assert chunk.end <= prompt.prompt_len, "a chunk crosses the end of its prompt"
            if chunk.splits_window and prompt.slot is None:
                prompt.slot = self._free_slots.pop()
            chunks.append(chunk)
        return chunks

    def _compact_tables(self, req_index: int, prompt: PromptState) -> None:
        """From the next step on: the gaps in force, and where new blocks are appended.

        What this step reads was copied to the device before.
        """
        for segment, storage in enumerate(prompt.storages):
            self.gap_starts.np[segment, req_index] = storage.decode.start
            self.gap_sizes.np[segment, req_index] = storage.decode.size
        self._gaps_changed = True
        num_blocks = self.block_tables.num_blocks.np
        for group, segment in enumerate(self.group_segments):
            kept = -(-prompt.storages[segment].kept // self.block_tables.block_sizes[group])
            self.stats.blocks_freed[self.policy_rows[req_index]] += (
                num_blocks[group, req_index] - kept
            )
            num_blocks[group, req_index] = kept

    def relink_blocks(self) -> dict[str, dict[int, np.ndarray]]:
        """After the forward pass: the blocks that stay come to the front of their tables.

        Only the tables change, not the cache. Returns by request and segment which blocks these
        are, for the scheduler, which frees the others: host arrays whose copies may be under way.
        """
        chosen = self.segmented.taps.take_blocks()
        for req_id, by_segment in chosen.items():
            row = self._req_index[req_id]
            for group, segment in enumerate(self.group_segments):
                if segment in by_segment:
                    kept = by_segment[segment]
                    table = self.block_tables.block_tables[group].gpu
                    table[row, : len(kept)] = table[row].index_select(0, kept)
        return {
            req_id: {segment: async_copy_to_np(kept) for segment, kept in by_segment.items()}
            for req_id, by_segment in chosen.items()
        }

    def _count(self, step: _Step, plan: list[SegmentRows | None]) -> None:
        computed = np.zeros_like(step.counts)
        for rows, size in zip(plan, self.segment_sizes, strict=True):
            computed = computed + (step.counts if rows is None else rows.counts) * size
        for chunk in step.chunks:
            first = chunk.state.first_selected
            if chunk.state.online is not None:
                low = chunk.state.online.lowest
                computed[chunk.batch_index] += (chunk.end - chunk.begin) * (low + 1)
            if chunk.is_last and first is not None:
                propagated = chunk.state.num_propagated
                computed[chunk.batch_index] += propagated * self.segment_sizes[first:].sum()
        prompt = np.clip(self.prompt_lens[step.requests] - step.begins, 0, step.counts)
        policies = self.policy_rows[step.requests]
        self.stats.add_step(policies, step.counts, prompt, computed)
        for chunk in step.chunks:
            if chunk.is_last:
                self.stats.add_prompt(int(policies[chunk.batch_index]), chunk.state)

    def _count_pivot(self, prompt: PromptState, pivot: int) -> None:
        """Counts what a prompt computes above the lowest pivot, known once its own is."""
        assert prompt.online is not None
        low = prompt.online.lowest
        self.stats.add_pivot(
            prompt.stats_row,
            pivot,
            more=prompt.prompt_len * (pivot - low),
            above=self.settings.num_layers - 1 - pivot,
            prompt=prompt,
        )

    def _check_blocks(self, step: _Step, ends: np.ndarray) -> None:
        """Compares the blocks the scheduler gave with what the stored lengths need.

        Raises:
            RuntimeError: the two sides disagree (debug switch ``kv_debug``).
        """
        rows = {chunk.batch_index: chunk.state.storages for chunk in step.chunks if chunk.is_last}
        for group, segment in enumerate(self.group_segments):
            lens = step.stored_lens[segment].copy()
            for index, storages in rows.items():
                lens[index] = storages[segment].rows
            block_size = self.block_tables.block_sizes[group]
            held = self.block_tables.num_blocks.np[group, step.requests]
            needed = -(-lens // block_size)
            if (held != needed).any():
                raise RuntimeError(
                    f"KV group {group}: scheduler gave {held.tolist()} blocks, "
                    f"stored lengths need {needed.tolist()}"
                )

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        ubatch_idx: int = 0,
        model_specific_attn_metadata: ModelSpecificAttnMetadata | None = None,
    ) -> dict[str, Any]:
        step, self._step = self._step, None
        if step is not None and step.batch is not input_batch:
            step = None  # A dummy batch, which no preprocess_state preceded.
        # A FULL graph runs every row of the batch; its rows are decodes or one-token chunks,
        # for which slots and lengths alone are exact.
        plan: list[SegmentRows | None] = [None] * len(self.segment_starts)
        if step is not None:
            if cudagraph_mode != CUDAGraphMode.FULL:
                plan = step.plan
            self._count(step, plan)
        num_reqs = input_batch.num_reqs_after_padding
        retrieves, retrieval = None, self.retrieval
        if retrieval is not None:
            retrieves = self._retrieval_pass(
                retrieval, step, plan, cudagraph_mode, for_capture, num_reqs, block_tables
            )
        metadata: dict[str, Any] = {}
        step_rows: list[StepRows | None] = []
        for segment, stored_lens in enumerate(self.stored_lens):
            groups = [
                group if self.group_segments[g] == segment else []
                for g, group in enumerate(attn_groups)
            ]
            batch = replace(input_batch, seq_lens=stored_lens[:num_reqs])
            if step is None:
                stored_lens[:num_reqs].copy_(input_batch.seq_lens[:num_reqs])
            else:
                bounds = np.zeros(num_reqs, dtype=np.int32)
                bounds[: input_batch.num_reqs] = step.stored_lens[segment]
                batch.seq_lens_cpu_upper_bound = torch.from_numpy(bounds)
            rows = plan[segment]

            def build(
                batch: InputBatch,
                groups: list[list[AttentionGroup]],
                rows: SegmentRows | None = rows,
            ) -> tuple[dict[str, Any], StepRows | None]:
                slots, tables, device_rows = slot_mappings, block_tables, None
                if rows is not None:
                    batch, tables, slots, device_rows = self._trim(
                        batch, block_tables, slots, rows, groups
                    )
                    if device_rows.num_rows == 0:
                        return {}, device_rows
                built = super(PolicyModelState, self).prepare_attn(
                    batch,
                    cudagraph_mode,
                    tables,
                    slots,
                    groups,
                    kv_cache_config,
                    for_capture,
                    ubatch_idx,
                    model_specific_attn_metadata,
                )
                return built, device_rows

            built, device_rows = build(batch, groups)
            metadata.update(built)
            step_rows.append(device_rows)
            if retrieves is not None and retrieves.modes[segment] is Mode.MIXED:
                assert retrieval is not None
                batch, groups = retrieval.stock_batch(
                    step.retrieval if step is not None else None,
                    segment,
                    batch,
                    groups,
                    attn_groups,
                )
                metadata.update(build(batch, groups)[0])
        step_plan = StepPlan(rows=step_rows, is_dummy=step is None, retrieval=retrieves)
        if step is not None and step.chunks:

            def metadata_of(batch: SelectedBatch, first_segment: int) -> dict[str, Any]:
                groups = [
                    group if self.group_segments[g] >= first_segment else []
                    for g, group in enumerate(attn_groups)
                ]
                return super(PolicyModelState, self).prepare_attn(
                    batch.of(input_batch),
                    CUDAGraphMode.NONE,
                    batch.block_tables,
                    batch.slot_mappings,
                    groups,
                    kv_cache_config,
                )

            self._passes.plan(step_plan, step.chunks, step.counts, plan, block_tables, metadata_of)
            online = [chunk for chunk in step.chunks if chunk.state.online is not None]
            if online:
                step_plan.is_empty = len(online) == len(step.requests)
                step_plan.online = OnlinePasses(
                    self._passes,
                    online,
                    np.cumsum(step.counts),
                    block_tables,
                    self.settings.num_layers,
                    metadata_of,
                    self._count_pivot,
                ).run
            for chunk in step.chunks:
                if chunk.is_last:
                    self._prompt_is_over(int(step.requests[chunk.batch_index]))
        self.segmented.begin_step(step_plan)
        return metadata

    def _retrieval_pass(
        self,
        retrieval: Retrieval,
        step: _Step | None,
        plan: list[SegmentRows | None],
        cudagraph_mode: CUDAGraphMode,
        for_capture: bool,
        num_reqs: int,
        block_tables: tuple[torch.Tensor, ...],
    ) -> RetrievalPass | None:
        if step is None:
            return retrieval.graph_pass(None, num_reqs, block_tables) if for_capture else None
        assert step.retrieval is not None
        prompt_lens = self.prompt_lens[step.requests]
        decodes = step.ends > prompt_lens
        decodes[step.retrieval.chunks] = False  # Tokens that run again, after preemption.
        self.stats.add_retrieval(
            self.policy_rows[step.requests],
            step.stored_lens * decodes,
            step.retrieval.lens,
            step.retrieval.budgets * retrieval.layout.unit,
        )
        if cudagraph_mode == CUDAGraphMode.FULL:
            return retrieval.graph_pass(step.retrieval, num_reqs, block_tables)
        return retrieval.eager_pass(
            step.retrieval, step.counts, plan, step.ends, prompt_lens, step.gaps, block_tables
        )

    def _trim(
        self,
        batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        rows: SegmentRows,
        groups: list[list[AttentionGroup]],
    ) -> tuple[InputBatch, tuple[torch.Tensor, ...], torch.Tensor, StepRows]:
        """What a segment runs: batch, block tables, slot mappings (G, N) and its N device rows.

        Requests without a row are left out: backends know them at the end of a batch only.
        """
        indices = async_tensor_h2d(rows.indices, device=self.device)
        same = rows.from_previous is rows.indices
        previous = indices if same else async_tensor_h2d(rows.from_previous, device=self.device)
        num_rows = len(rows.indices)
        busy = np.flatnonzero(rows.counts)
        counts = rows.counts[busy]
        starts = np.zeros(len(busy) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        seq_lens = batch.seq_lens[: batch.num_reqs]
        if len(busy) < batch.num_reqs:
            requests = async_tensor_h2d(busy, device=self.device)
            seq_lens = seq_lens.index_select(0, requests)
            block_tables = tuple(
                table.index_select(0, requests) if group else table
                for table, group in zip(block_tables, groups, strict=True)
            )
        assert batch.seq_lens_cpu_upper_bound is not None
        positions = batch.positions.index_select(0, indices)
        slots = slot_mappings.index_select(1, indices)
        names = {
            name: slots[g]
            for g, group in enumerate(groups)
            for attn_group in group
            for name in attn_group.layer_names
        }
        trimmed = replace(
            batch,
            num_reqs=len(busy),
            num_reqs_after_padding=len(busy),
            idx_mapping_np=batch.idx_mapping_np[busy],
            num_scheduled_tokens=counts,
            num_tokens=num_rows,
            num_tokens_after_padding=num_rows,
            query_start_loc=async_tensor_h2d(starts, device=self.device),
            query_start_loc_np=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[torch.from_numpy(busy)],
            is_prefilling_np=batch.is_prefilling_np[busy],
            positions=positions,
        )
        return trimmed, block_tables, slots, StepRows(previous, indices, positions, names)

    def kv_policy_stats(self) -> dict[str, Any]:
        """Layout, pool and cumulative counters, JSON-able."""
        policies = self.stats.as_dict()
        sizes = self.block_tables.block_sizes
        for index in self._req_index.values():
            counters = policies[self.stats.names[self.policy_rows[index]]]
            held = self.block_tables.num_blocks.np[:, index]
            full = [-(-int(self.seq_lens[index]) // size) for size in sizes]
            counters["blocks_held"] += int(held.sum())
            counters["blocks_saved"] += int(sum(full) - held.sum())
        groups = [
            {"layers": group.layer_names, "block_size": size, "segment": segment}
            for group, size, segment in zip(
                self.kv_cache_config.kv_cache_groups, sizes, self.group_segments, strict=True
            )
        ]
        pool = pool_tokens(self.kv_cache_config, self.settings, self.max_model_len)
        stash = self.stash
        return {
            "seconds_in_retention": self.segmented.taps.timer.seconds,
            "seconds_in_detector": self.segmented.taps.detector_timer.seconds,
            "kv_bytes_moved": self.segmented.taps.bytes_moved,
            **({"retrieval": self.retrieval.stats()} if self.retrieval is not None else {}),
            "stash_tokens": self.settings.stash_tokens,
            "stash_tokens_used": stash.used_tokens if stash is not None else 0,
            "layout": {
                "groups": groups,
                "num_blocks": pool.num_blocks,
                "pool_prompt_tokens": pool.policy,
                "stock_pool_tokens": pool.stock,
            },
            "policies": policies,
        }
