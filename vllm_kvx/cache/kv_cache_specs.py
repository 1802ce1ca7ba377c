"""KV cache specs of layers whose stored entries follow a policy.

The layers of the first stage stay full attention, with vLLM's prefix cache. Every later stage
gets groups of its own. Both have managers that allocate blocks by *stored* entries. Registered
with vLLM when this module is imported, which unpickling a spec does in every process that needs it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvx.cache.group_size import FEWER_GROUPS, buckets_of, group_layers
from vllm_kvx.cache.later_stage_manager import LaterStageKVCacheManager
from vllm_kvx.cache.managers import FirstStageKVCacheManager
from vllm_kvx.cache.sliding_stage_manager import SlidingStageKVCacheManager
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.indexes.base import PageShape
from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.int8.layout import scale_bytes, scales_offset
from vllm_kvx.policy.layout import Layout, RetrievalLayout

logger = init_logger("vllm.kvx.cache")


@dataclass(frozen=True, kw_only=True)
class FirstStageAttentionSpec(FullAttentionSpec):
    """Full attention in the first stage, whose entries may go when a prompt is in.

    bucket: splits the layers so that groups come out in the chosen size, where vLLM's own choice
        of group size would pad more than needed.
    """

    bucket: int = 0

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        # A drafter's layers have full attention, too, and no policy.
        return all(isinstance(spec, FirstStageAttentionSpec) for spec in kv_cache_specs.values())

    @classmethod
    def merge(cls, specs: list["FirstStageAttentionSpec"]) -> "FirstStageAttentionSpec":
        return KVCacheSpec.merge.__func__(cls, specs)  # type: ignore[attr-defined]


def without_bucket(spec: KVCacheSpec) -> KVCacheSpec:
    """What layers of a stage have in common, in whichever KV group they are."""
    if isinstance(spec, FirstStageAttentionSpec | LaterStageAttentionSpec):
        return replace(spec, bucket=0)
    return spec


@dataclass(frozen=True, kw_only=True)
class LaterStageAttentionSpec(AttentionSpec):
    """KV of one layer of a stage whose entries follow the request's policy.

    Not a ``FullAttentionSpec``: vLLM would merge such layers with the first stage's.

    Attributes:
        stage: index of the KV stage, 1 or higher.
        start_layer: the stage's first layer.
        bucket: as in ``FirstStageAttentionSpec``.
    """

    dcp_sharded: bool = True  # As the first stage's.
    stage: int
    start_layer: int
    bucket: int = 0

    @property
    def prefix_cacheable(self) -> bool:
        # Its entries are not the prompt's tokens in order; anchors are shared by the manager.
        return False

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        # A `full` request, or one long answer, stores every token: the honest worst case.
        return cdiv(vllm_config.model_config.max_model_len, self.block_size) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class SlidingStageSpec(SlidingWindowSpec):
    """KV of one layer that slides, of a stage whose entries follow the request's policy.

    stage, start_layer: as in ``LaterStageAttentionSpec``.
    """

    stage: int
    start_layer: int


@dataclass(frozen=True, kw_only=True)
class DraftAttentionSpec(FullAttentionSpec):
    """KV of one layer of a drafter, model or head: it reads whole contexts, whatever the policy.

    A class of its own: vLLM would merge such layers with the first stage's.
    """

    @classmethod
    def merge(cls, specs: list["DraftAttentionSpec"]) -> "DraftAttentionSpec":
        return KVCacheSpec.merge.__func__(cls, specs)  # type: ignore[attr-defined]


def draft_specs(layers: Sequence[Attention], page_bytes: int) -> None:
    """Gives the layers of a drafter their KV cache spec.

    page_bytes: of the model's own pages, sidecars included: all pages of a pool have one size.

    Raises:
        ValueError: a layer has no full attention, or larger pages.
    """
    for layer in layers:
        _change_spec(layer, lambda spec, _: _of_drafts(spec, page_bytes))


def _of_drafts(spec: KVCacheSpec, page_bytes: int) -> KVCacheSpec:
    if type(spec) is not FullAttentionSpec:
        raise _no_drafter("some of its layers slide over a window or keep a state")
    if spec.page_size_bytes > page_bytes:
        raise _no_drafter(
            f"{spec.block_size} tokens take {spec.page_size_bytes} bytes in a layer of it, and "
            f"{page_bytes} in one of the model that it drafts for"
        )
    values = {f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec)}
    if spec.page_size_bytes < page_bytes:
        values["page_size_padded"] = page_bytes
    return DraftAttentionSpec(**values)


def _no_drafter(reason: str) -> ValueError:
    return ValueError(
        f"this drafter cannot draft under the server's KV policies: {reason}. Set another "
        "model in --speculative-config, or its method to ngram"
    )


def sliding_stage_specs(sliding: Mapping[int, Attention], layout: Layout) -> None:
    """Gives every layer that slides above a row cut the KV cache spec of its stage.

    sliding: the attention of the layers that slide, by their numbers in the decoder.
    """
    for number, layer in sliding.items():
        stage = layout.sliding_stage_of(number)
        if stage is not None:
            _slide(layer, stage, layout.stages[stage].start)


def _slide(layer: Attention, stage: int, start: int) -> None:
    def slide(spec: KVCacheSpec, _: VllmConfig) -> KVCacheSpec:
        assert type(spec) is SlidingWindowSpec, f"unexpected KV cache spec {spec}"
        values = {f.name: getattr(spec, f.name) for f in fields(SlidingWindowSpec)}
        return SlidingStageSpec(**values, stage=stage, start_layer=start)

    _change_spec(layer, slide)


def policy_kv_cache_specs(
    attention: Sequence[Attention],
    settings: KVSettings,
    others: int = 0,
    sliding: Sequence[Attention] = (),
    numbers: Sequence[int] = (),
    everywhere: Sequence[int] = (),
    has_drafter: bool = False,
) -> None:
    """Gives every policy layer the KV cache spec of its stage; all others keep vLLM's own.

    Args:
        attention: of the policy layers, in order. others: layers of the model that are none.
        sliding: the attention of those that slide.
        numbers: by which stages know the policy layers, if not by their order.
        everywhere: the numbers of all policy layers of the model, of which other workers of a
            pipeline may have some. KV groups are those of the whole model.
        has_drafter: whether a drafter has KV groups of its own.
    """
    layout, numbered = settings.layout, dict(zip(numbers or count(), attention, strict=False))
    stages: list[list[int]] = [[] for _ in layout.stage_starts]
    for number in everywhere or numbered:
        stages[layout.stage_of(number)].append(number)
    sizes = [len(in_stage) for in_stage in stages]
    # Beside groups of its own, vLLM's choice of a group's size has to do.
    buckets = None if others or has_drafter else buckets_of(sizes)
    if others:
        logger.info(
            "KV policy %s: it is about the %d layers that have full attention. The other %d keep a "
            "window or a state, however long the context is.",
            *(settings.policy, sum(sizes), others),
        )
    elif has_drafter:
        logger.info(
            "KV policy %s: stages of %s layers. The drafter's layers follow no policy.",
            *(settings.policy, " + ".join(map(str, sizes))),
        )
    else:
        groups = group_layers(sizes)
        logger.info("KV policy %s: %s", settings.policy, groups.says(sizes))
        if groups.has_many:
            logger.warning(
                "KV policy %s: so many KV groups take time in every step. vLLM makes none larger "
                "beside a stage of so few layers: %s.",
                *(settings.policy, FEWER_GROUPS),
            )
    pages = None
    if layout.sidecar is not None:
        pages = _Pages(layout.sidecar, attention[0], sliding)
        for layer in sliding:
            _change_spec(layer, pages.as_large)
    for stage, in_stage in enumerate(stages):
        num_buckets = 1 if buckets is None else buckets[stage]
        start = layout.stage_starts[stage]
        for offset, number in enumerate(in_stage):
            if (here := numbered.get(number)) is not None:
                _override_spec(here, stage, start, offset % num_buckets, pages)


def page_shape(spec: AttentionSpec, sidecar: RetrievalLayout) -> PageShape:
    """What the sidecar of a page of `spec` has to cover."""
    return PageShape(spec.num_kv_heads, spec.block_size, spec.head_size, sidecar.group)


def sidecar_bytes(spec: AttentionSpec, sidecar: RetrievalLayout) -> int:
    """Bytes of the sidecar in a page of `spec`; ValueError where it has none."""
    return INDEXES[sidecar.index].page_bytes(page_shape(spec, sidecar))


def tail_bytes(spec: AttentionSpec, of_sidecar: int) -> int:
    """Bytes behind the entries of a page: a sidecar of so many, and the scales of 8-bit entries."""
    if not spec.kv_quant_mode.is_per_token_head:
        return of_sidecar
    entries = spec.unpadded_page_size_bytes
    begin = scales_offset(entries, of_sidecar)
    return begin + scale_bytes(spec.num_kv_heads, spec.block_size) - entries


class _Pages:
    """Where pages of policy layers have room for a sidecar: all pages of a pool have one size.

    vLLM could make blocks of smaller pages longer, or pad them, but does neither where pages have
    a size of their own already, as those with a sidecar.
    """

    def __init__(
        self, sidecar: RetrievalLayout, policy_layer: Attention, sliding: Sequence[Attention]
    ) -> None:
        """policy_layer: any one; its heads are all others'. sliding: what slides beside them."""
        self._sidecar = sidecar
        # What they ask for before anything here changes it.
        self._policy_spec = policy_layer.get_kv_cache_spec
        self._sliding_specs = [layer.get_kv_cache_spec for layer in sliding]

    def with_room(self, spec: Any, vllm_config: VllmConfig) -> Any:
        """The spec of a policy layer: blocks as long as the largest page of a window needs."""
        specs = [ask(vllm_config) for ask in self._sliding_specs]
        largest = max((each.page_size_bytes for each in specs if each is not None), default=0)
        times = max(cdiv(largest, spec.page_size_bytes + self._room(spec)), 1)
        if times == 1:
            return replace(spec, page_size_padded=spec.page_size_bytes + self._room(spec))
        page = spec.page_size_bytes * times
        spec = replace(spec, block_size=spec.block_size * times, page_size_padded=None)
        return replace(spec, page_size_padded=page + self._room(spec))

    def as_large(self, spec: Any, vllm_config: VllmConfig) -> Any:
        """The spec of a layer that slides, with as many entries as such a page takes."""
        page = self.with_room(self._policy_spec(vllm_config), vllm_config).page_size_bytes
        times = page // spec.page_size_bytes
        return replace(spec, block_size=spec.block_size * times, page_size_padded=page)

    def _room(self, spec: Any) -> int:
        return tail_bytes(spec, sidecar_bytes(spec, self._sidecar))


def _change_spec(layer: Attention, change: Callable[[Any, VllmConfig], KVCacheSpec]) -> None:
    """The layer asks vLLM for `change` of the spec that it would ask for."""
    stock = layer.get_kv_cache_spec

    def get_kv_cache_spec(vllm_config: VllmConfig) -> KVCacheSpec:
        return change(stock(vllm_config), vllm_config)

    layer.get_kv_cache_spec = get_kv_cache_spec  # type: ignore[method-assign]


def _override_spec(
    layer: Attention, stage: int, start: int, bucket: int, pages: _Pages | None
) -> None:
    def of_stage(spec: KVCacheSpec, vllm_config: VllmConfig) -> KVCacheSpec:
        assert type(spec) is FullAttentionSpec, f"unexpected KV cache spec {spec}"
        if pages is not None:
            spec = pages.with_room(spec, vllm_config)
        if stage == 0:
            values = {f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec)}
            return FirstStageAttentionSpec(**values, bucket=bucket)
        values = {f.name: getattr(spec, f.name) for f in fields(AttentionSpec)}
        return LaterStageAttentionSpec(**values, stage=stage, start_layer=start, bucket=bucket)

    _change_spec(layer, of_stage)


# The registry fills itself only while it is empty, so vLLM's own specs have to go in first.
register_all_kvcache_specs(None)
KVCacheSpecRegistry.register(FirstStageAttentionSpec, FirstStageKVCacheManager, FullAttentionSpec)
KVCacheSpecRegistry.register(
    LaterStageAttentionSpec, LaterStageKVCacheManager, LaterStageAttentionSpec
)
KVCacheSpecRegistry.register(SlidingStageSpec, SlidingStageKVCacheManager, SlidingStageSpec)
KVCacheSpecRegistry.register(DraftAttentionSpec, FullAttentionManager, DraftAttentionSpec)
