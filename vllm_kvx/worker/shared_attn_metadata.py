"""Attention metadata of KV groups that differ in their block tables and slots alone.

A policy makes several KV groups of what is one for stock vLLM, and vLLM builds metadata for each:
FlashAttention 3 plans the batch ahead, with three kernels and a good part of the worker's time.
Groups of one stage have the same rows and lengths, so one plan serves them all, where the backend
can put it beside other tables: FlashAttention and vLLM's CPU kernels, not Triton's or FlashInfer.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.utils import AttentionGroup

from vllm_kvx.cache.kv_cache_specs import without_bucket
from vllm_kvx.models.passes import AttnMetadata

AttentionGroups = list[list[AttentionGroup]]


def only(attn_groups: AttentionGroups, wanted: Collection[int]) -> AttentionGroups:
    """By KV group, the attention groups of those that are `wanted`, and none of others."""
    return [group if g in wanted else [] for g, group in enumerate(attn_groups)]


class SharedAttnMetadata:
    """The KV groups of an engine, told apart by their specs.

    prepare_attn: vLLM's own, by which a model state has metadata built.

    All layers of the models that run under a policy have as many query heads.
    """

    def __init__(
        self, groups: Sequence[KVCacheGroupSpec], prepare_attn: Callable[..., AttnMetadata]
    ) -> None:
        self.prepare_attn = prepare_attn
        specs = [without_bucket(group.kv_cache_spec) for group in groups]
        self._kinds = [specs.index(spec) for spec in specs]

    def build(
        self,
        batch: InputBatch,
        mode: CUDAGraphMode,
        block_tables: tuple[Tensor, ...],
        slot_mappings: Tensor,
        attn_groups: AttentionGroups,
        *more: Any,
    ) -> AttnMetadata:
        """What `prepare_attn` makes of the arguments: metadata by layer.

        Args:
            block_tables, slot_mappings, attn_groups: by KV group.
        """
        first: dict[int, AttentionGroup] = {}
        like: list[tuple[int, AttentionGroup, AttentionGroup]] = []
        built: AttentionGroups = []
        for index, groups in enumerate(attn_groups):
            kind = self._kinds[index]
            before = first.get(kind)
            if before is not None and _take_over(before, groups):
                like.append((index, groups[0], before))
                built.append([])
                continue
            built.append(groups)
            if len(groups) == 1:
                first.setdefault(kind, groups[0])
        metadata = self.prepare_attn(batch, mode, block_tables, slot_mappings, built, *more)
        for index, group, before in like:
            theirs = metadata[before.layer_names[0]]
            own = _with_tables(group, theirs, block_tables[index], slot_mappings[index])
            metadata.update(dict.fromkeys(group.layer_names, own))
        return metadata


def _take_over(first: AttentionGroup, groups: Sequence[AttentionGroup]) -> bool:
    """Whether metadata built for `first` does for `groups` of a KV group of the same spec."""
    if len(groups) != 1 or groups[0].backend is not first.backend:
        return False
    # Where the backend's blocks are smaller than the pool's, tables are not those of the batch.
    mapped = first.kernel_block_size is not None or groups[0].kernel_block_size is not None
    can = groups[0].get_metadata_builder().supports_update_block_table
    return not mapped and (can or _is_cpu(first))


def _with_tables(group: AttentionGroup, metadata: Any, table: Tensor, slots: Tensor) -> Any:
    if _is_cpu(group):
        return replace(metadata, block_table=table, slot_mapping=slots)
    return group.get_metadata_builder().update_block_table(metadata, table, slots)


def _is_cpu(group: AttentionGroup) -> bool:
    """Whether it attends by vLLM's CPU kernels, whose builder has no such method."""
    return group.backend.get_name() == "CPU_ATTN"
