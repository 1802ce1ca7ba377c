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
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_kvx import accounting
from vllm_kvx.cache.pool import pool_tokens, segment_of
from vllm_kvx.models.segmented import SegmentedModel, StepRows
from vllm_kvx.ops.slots import map_slots
from vllm_kvx.settings import KVSettings, request_policy
from vllm_kvx.worker.rows import SegmentRows, plan_rows
from vllm_kvx.worker.stats import PolicyStats


@dataclass(frozen=True)
class _Step:
    """A real batch between ``preprocess_state`` and ``prepare_attn``.

    Attributes:
        batch: the batch itself, which dummy batches are not.
        requests: (R,) request-state indices.
        begins, counts: (R,) int64 first position and tokens of each request.
        plan: rows of every segment above the first; None runs all.
        stored_lens: (S, R) stored lengths in these segments, this step's tokens included.
    """

    batch: InputBatch
    requests: np.ndarray
    begins: np.ndarray
    counts: np.ndarray
    plan: list[SegmentRows | None]
    stored_lens: accounting.IntArray


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
        self.segment_starts = settings.layout.splits
        bounds = (0, *self.segment_starts, settings.num_layers)
        self.segment_sizes = np.diff(np.array(bounds, dtype=np.int64))
        num_upper = len(self.segment_starts)

        # By upper segment and request state. The host copy is the source of truth.
        self.gap_starts = UvaBackedTensor((num_upper, self.max_num_reqs), dtype=torch.int32)
        self.gap_sizes = UvaBackedTensor((num_upper, self.max_num_reqs), dtype=torch.int32)
        self.prompt_lens = np.zeros(self.max_num_reqs, dtype=np.int32)
        self.policy_rows = np.zeros(self.max_num_reqs, dtype=np.int64)
        self.seq_lens = np.zeros(self.max_num_reqs, dtype=np.int64)
        # By upper segment, in batch order; at a fixed address for CUDA graphs.
        self.stored_lens = torch.zeros(
            num_upper, self.max_num_reqs, dtype=torch.int32, device=device
        )
        self.stats = PolicyStats(settings.num_layers)
        self._req_index: dict[str, int] = {}
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
        upper = [(g, s - 1) for g, s in enumerate(self.group_segments) if s > 0]
        ids, segments = zip(*upper, strict=True)
        self._upper_groups = torch.tensor(ids, dtype=torch.int32, device=self.device)
        self._upper_segments = torch.tensor(segments, dtype=torch.int32, device=self.device)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        policy = request_policy(self.settings, new_req_data.sampling_params)
        prompt_len = new_req_data.prompt_len
        for segment, start_layer in enumerate(self.segment_starts):
            gap = accounting.gap_of(policy, prompt_len, start_layer)
            self.gap_starts.np[segment, req_index] = gap.start
            self.gap_sizes.np[segment, req_index] = gap.size
        self.prompt_lens[req_index] = prompt_len
        row = self.policy_rows[req_index] = self.stats.row_of(policy)
        if len(new_req_data.prefill_token_ids or ()) == prompt_len:  # Not one that resumes.
            self.stats.requests[row] += 1
        self._req_index[new_req_data.req_id] = req_index

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self._req_index.pop(req_id, None)

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        self.gap_starts.copy_to_uva()
        self.gap_sizes.copy_to_uva()

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        super().preprocess_state(input_batch, block_tables, kv_cache_config, num_computed_tokens)
        tables = self.block_tables
        map_slots(
            self._upper_groups,
            self._upper_segments,
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
        self._step = _Step(
            input_batch,
            requests,
            begins,
            counts,
            plan_rows(begins, counts, gap_starts, gap_sizes),
            accounting.stored_lens(ends, gap_starts, gap_sizes),
        )
        self.seq_lens[requests] = ends
        if self.settings.debug:
            self._check_blocks(self._step, ends)

    def _count(self, step: _Step, plan: list[SegmentRows | None]) -> None:
        computed = step.counts * self.segment_sizes[0]
        for rows, size in zip(plan, self.segment_sizes[1:], strict=True):
            computed = computed + (step.counts if rows is None else rows.counts) * size
        prompt = np.clip(self.prompt_lens[step.requests] - step.begins, 0, step.counts)
        self.stats.add_step(self.policy_rows[step.requests], step.counts, prompt, computed)

    def _check_blocks(self, step: _Step, ends: np.ndarray) -> None:
        """Compares the blocks the scheduler gave with what the stored lengths need.

        Raises:
            RuntimeError: the two sides disagree (debug switch ``kv_debug``).
        """
        for group, segment in enumerate(self.group_segments):
            lens = ends if segment == 0 else step.stored_lens[segment - 1]
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
        metadata: dict[str, Any] = {}
        step_rows: list[StepRows | None] = []
        for segment in range(len(self.segment_starts) + 1):
            groups = [
                group if self.group_segments[g] == segment else []
                for g, group in enumerate(attn_groups)
            ]
            batch, slots, tables = input_batch, slot_mappings, block_tables
            if segment > 0:
                stored_lens = self.stored_lens[segment - 1]
                batch = replace(input_batch, seq_lens=stored_lens[:num_reqs])
                if step is None:
                    stored_lens[:num_reqs].copy_(input_batch.seq_lens[:num_reqs])
                else:
                    bounds = np.zeros(num_reqs, dtype=np.int32)
                    bounds[: input_batch.num_reqs] = step.stored_lens[segment - 1]
                    batch.seq_lens_cpu_upper_bound = torch.from_numpy(bounds)
                rows = plan[segment - 1]
                if rows is None:
                    step_rows.append(None)
                else:
                    batch, tables, slots, device_rows = self._trim(
                        batch, block_tables, slots, rows, groups
                    )
                    step_rows.append(device_rows)
                    if device_rows.num_rows == 0:
                        continue
            metadata.update(
                super().prepare_attn(
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
            )
        self.segmented.begin_step(step_rows, is_dummy=step is None)
        return metadata

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
        pool = pool_tokens(self.kv_cache_config, self.settings)
        return {
            "layout": {
                "groups": groups,
                "num_blocks": pool.num_blocks,
                "pool_prompt_tokens": pool.policy,
                "stock_pool_tokens": pool.stock,
            },
            "policies": policies,
        }
