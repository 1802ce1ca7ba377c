"""The attention metadata of one step: of its batch, stage by stage, and of passes of their own."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_kvx.models.passes import AttnMetadata
from vllm_kvx.worker.batch import PassBatch, to_device, unplanned
from vllm_kvx.worker.prefill.selected_passes import lens_to_device
from vllm_kvx.worker.prefill.step_batch import StepBatch
from vllm_kvx.worker.rows import DeviceRows
from vllm_kvx.worker.shared_attn_metadata import AttentionGroups, SharedAttnMetadata, only
from vllm_kvx.worker.step import Step


@dataclass(frozen=True)
class StepAttention:
    """What vLLM hands over to build a step's attention metadata from.

    Attributes:
        shared: the KV groups that one plan serves, and vLLM's own `prepare_attn`.
        batch: the step's; R requests, padded. mode: how the step runs.
        block_tables: (R, B) int32 by KV group. slot_mappings: (G, T) int64.
        attn_groups: by KV group.
        more: what else `prepare_attn` takes after the groups, the KV cache's config first.
        max_num_reqs: the most requests that attention backends have planned room for.
        drafts_ahead: see ``Layout``.
    """

    shared: SharedAttnMetadata
    batch: InputBatch
    mode: CUDAGraphMode
    block_tables: tuple[Tensor, ...]
    slot_mappings: Tensor
    attn_groups: AttentionGroups
    more: tuple[Any, ...]
    max_num_reqs: int
    drafts_ahead: bool = False

    @cached_property
    def late(self) -> Tensor | None:
        """(R,) int32 tokens that the host takes for computed and that were rejected; None where it
        knows."""
        if not self.drafts_ahead:
            return None
        num_reqs, bounds = self.batch.num_reqs, self.batch.seq_lens_cpu_upper_bound
        assert bounds is not None
        most = lens_to_device(bounds[:num_reqs].numpy(), self.slot_mappings.device)
        return most - self.batch.seq_lens[:num_reqs]

    @property
    def size(self) -> tuple[int, int]:
        """Rows and requests of the step, padding included."""
        return self.batch.num_tokens_after_padding, self.batch.num_reqs_after_padding

    def of_rows(
        self, batch: InputBatch, groups: AttentionGroups, rows: DeviceRows | None
    ) -> AttnMetadata:
        """Metadata of `batch`, the step's with a stage's lengths, by layer name.

        Args:
            groups: by KV group; nothing is built for the groups of an empty one.
            rows: those that the layers run on; None stands for all of the batch.
        """
        tables, slots = self.block_tables, self.slot_mappings
        if rows is not None:
            if rows.num_rows == 0:
                return {}
            batch = rows.of_stage(batch)
            tables, slots = rows.batch.block_tables, rows.batch.slot_mappings
        return self.shared.build(batch, self.mode, tables, slots, groups, *self.more)

    def stock(self, groups: AttentionGroups) -> AttnMetadata:
        """Metadata of the step's own batch, for KV groups that follow no policy."""
        tables, slots = self.block_tables, self.slot_mappings
        return self.shared.prepare_attn(self.batch, self.mode, tables, slots, groups, *self.more)

    def of_pass(
        self,
        batch: PassBatch,
        ends: np.ndarray,
        groups: Collection[int],
        is_prefill: bool = True,
        is_known: np.ndarray | None = None,
    ) -> AttnMetadata:
        """Metadata of a pass with rows of its own; see ``step_batch.MetadataOf``."""
        prefilling = np.ones(len(ends), dtype=bool) if is_prefill else None
        lens, bounds = lens_to_device(ends, self.slot_mappings.device), torch.from_numpy(ends)
        if self.late is not None and not is_prefill:
            unknown = np.arange(len(ends)) if is_known is None else np.flatnonzero(~is_known)
            late = self.late.index_select(0, to_device(batch.requests[unknown], lens.device))
            lens.index_add_(0, to_device(unknown, lens.device), late, alpha=-1)
        wanted = only(self.attn_groups, groups)
        with unplanned(wanted if len(ends) > self.max_num_reqs else ()):
            return self.shared.build(
                batch.of(self.batch, lens, bounds, prefilling),
                CUDAGraphMode.NONE,
                batch.block_tables,
                batch.slot_mappings,
                wanted,
                self.more[0],
            )

    def of_decodes(self, batch: PassBatch, lens: Tensor, bounds: np.ndarray) -> AttnMetadata:
        """Metadata of a pass of one generated token each, in all KV groups.

        lens: (P,) int32 entries that each sees. bounds: (P,) int32, as many or more, on the host.
        """
        is_prefilling = np.zeros(len(bounds), dtype=bool)
        return self.shared.build(
            batch.of(self.batch, lens, torch.from_numpy(bounds), is_prefilling),
            CUDAGraphMode.NONE,
            batch.block_tables,
            batch.slot_mappings,
            self.attn_groups,
            self.more[0],
        )

    def step_batch(self, step: Step, metadata: AttnMetadata, retrieves: bool) -> StepBatch:
        """What passes need to know of the batch of `step`, whose layers have `metadata`.

        retrieves: whether decode tokens of this step may read less than all.
        """
        return StepBatch(
            step.requests,
            np.cumsum(step.counts),
            step.begins,
            step.counts,
            step.stored_lens,
            self.batch.positions,
            self.block_tables,
            self.slot_mappings,
            metadata,
            self.of_pass,
            step.projected,
            step.retrieval if retrieves else None,
        )
