"""KV cache specs and manager of layers whose stored entries follow a policy.

The layers of the first segment keep vLLM's own full-attention groups. Every later segment gets
groups of its own, whose manager allocates blocks by *stored* entries (``accounting``), not by
token positions. Registered with vLLM when this module is imported, which unpickling a spec does
in every process that needs it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from vllm_kvx.accounting import NO_GAP, Gap
from vllm_kvx.policy.layout import GroupChoice, choose_group_size, grouped
from vllm_kvx.settings import KVSettings

logger = init_logger("vllm.kvx.cache")


@dataclass(frozen=True, kw_only=True)
class LowerAttentionSpec(FullAttentionSpec):
    """Full attention, split into buckets so that groups come out in the chosen size.

    Only used where vLLM's own choice of group size would pad more than needed.
    """

    bucket: int

    @classmethod
    def merge(cls, specs: list["LowerAttentionSpec"]) -> "LowerAttentionSpec":
        return KVCacheSpec.merge.__func__(cls, specs)  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class PolicyAttentionSpec(AttentionSpec):
    """KV of one layer of a segment whose entries follow the request's policy.

    Not a ``FullAttentionSpec``: vLLM would merge such layers with the lower segment's.

    Attributes:
        segment: index of the segment, 1 or higher.
        start_layer: the segment's first layer.
        bucket: as in ``LowerAttentionSpec``.
    """

    dcp_sharded: bool = False
    segment: int
    start_layer: int
    bucket: int = 0

    @property
    def prefix_cacheable(self) -> bool:
        # Its entries are not the prompt's tokens in order; anchors are shared by the manager.
        return False

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        # A `full` request, or one long answer, stores every token: the honest worst case.
        return cdiv(vllm_config.model_config.max_model_len, self.block_size) * self.page_size_bytes


def policy_kv_cache_specs(attention: Sequence[Attention], settings: KVSettings) -> None:
    """Gives every layer the KV cache spec of its segment.

    Args:
        attention: the model's attention layers, in order.
    """
    sizes = settings.layout.segment_sizes(len(attention))
    starts = (0, *settings.layout.splits)
    buckets = _buckets(sizes)
    choice = group_layers(sizes)
    logger.info(
        "KV policy %s: segments of %s layers in %s KV groups of %d layers, %d padding layers",
        settings.policy,
        " + ".join(map(str, sizes)),
        " + ".join(map(str, choice.groups_per_segment)),
        choice.size,
        choice.padding_layers,
    )
    for segment, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        num_buckets = 1 if buckets is None else buckets[segment]
        for offset, layer in enumerate(attention[start : start + size]):
            if segment > 0 or buckets is not None:
                _override_spec(layer, segment, start, offset % num_buckets)


def group_layers(segment_sizes: Sequence[int]) -> GroupChoice:
    """The KV groups that vLLM forms for these segments, with the buckets given to it."""
    if _buckets(segment_sizes) is not None:
        return choose_group_size(segment_sizes)
    return grouped(segment_sizes, _vllm_group_size(segment_sizes))


def _buckets(segment_sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Buckets per segment that make vLLM pick our group size; None where it does without.

    None also where it cannot be made to: vLLM takes the smallest bucket's size unless the largest
    is less than 1.5 times that.
    """
    choice = choose_group_size(segment_sizes)
    if _vllm_group_size(segment_sizes) == choice.size:
        return None
    sizes = [
        layers // n + (i < layers % n)
        for layers, n in zip(segment_sizes, choice.groups_per_segment, strict=True)
        for i in range(n)
    ]
    return choice.groups_per_segment if _vllm_group_size(sizes) == choice.size else None


def _vllm_group_size(bucket_sizes: Sequence[int]) -> int:
    """The rule of ``_get_kv_cache_groups_uniform_page_size`` in vLLM 0.32."""
    small, large = min(bucket_sizes), max(bucket_sizes)
    return large if large < small * 1.5 else small


def _override_spec(layer: Attention, segment: int, start: int, bucket: int) -> None:
    stock = layer.get_kv_cache_spec

    def get_kv_cache_spec(vllm_config: VllmConfig) -> KVCacheSpec:
        spec = stock(vllm_config)
        assert type(spec) is FullAttentionSpec, f"unexpected KV cache spec {spec}"
        if segment == 0:
            values = {f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec)}
            return LowerAttentionSpec(**values, bucket=bucket)
        values = {f.name: getattr(spec, f.name) for f in fields(AttentionSpec)}
        values["dcp_sharded"] = False
        return PolicyAttentionSpec(**values, segment=segment, start_layer=start, bucket=bucket)

    layer.get_kv_cache_spec = get_kv_cache_spec  # type: ignore[method-assign]


@dataclass(frozen=True)
class RequestKV:
    """What the manager must know of a request.

    Attributes:
        gap: its gap in this manager's segment.
        anchors: leading tokens whose entries a prefix hit must bring along.
        anchor_hash: key of those entries, by their tokens; ``None`` if they cannot be shared.
    """

    gap: Gap = NO_GAP
    anchors: int = 0
    anchor_hash: BlockHash | None = None


class PolicyKVCacheManager(SingleTypeKVCacheManager):
    """Blocks of one KV group above the first segment, sized by stored entries.

    On a prefix hit in the lower layers the anchors are not computed, but their entries up here
    depend on their own tokens alone. So the first block of a request that did compute them is
    published under the anchors' tokens, and a request with a hit copies it into its own.
    """

    def __init__(self, kv_cache_spec: PolicyAttentionSpec, **kwargs) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.spec = kv_cache_spec
        self.requests: dict[str, RequestKV] = {}
        self._to_publish: dict[str, BlockHash] = {}
        self._to_copy: dict[str, KVCacheBlock] = {}

    def add_request(self, request_id: str, kv: RequestKV) -> None:
        self.requests[request_id] = kv

    def remove_request(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def find_anchors(self, anchor_hash: BlockHash) -> KVCacheBlock | None:
        """The published block that starts with these anchors, if it is still in the pool."""
        found = self.block_pool.get_cached_block(anchor_hash, [self.kv_cache_group_id])
        return found[0] if found else None

    def _required_blocks(self, request_id: str, num_tokens: int) -> int:
        gap = self.requests.get(request_id, RequestKV()).gap
        return cdiv(gap.stored_len(num_tokens), self.block_size)

    def _anchors_to_copy(self, request_id: str) -> KVCacheBlock | None:
        anchor_hash = self.requests.get(request_id, RequestKV()).anchor_hash
        return None if anchor_hash is None else self.find_anchors(anchor_hash)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        assert not new_computed_blocks
        held = len(self.req_to_blocks.get(request_id, ()))
        num_new_blocks = max(self._required_blocks(request_id, num_tokens) - held, 0)
        if held == 0 and num_local_computed_tokens > 0:
            source = self._anchors_to_copy(request_id)
            if source is not None:
                # Touching an evictable block takes it out of the free ones.
                num_new_blocks += self._get_num_evictable_blocks([source])
        return num_new_blocks

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        assert not new_computed_blocks and num_external_computed_tokens == 0
        self.num_cached_block[request_id] = 0
        if num_local_computed_tokens > 0:
            source = self._anchors_to_copy(request_id)
            if source is not None:
                self.block_pool.touch([source])
                self._to_copy[request_id] = source

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        req_blocks = self.req_to_blocks[request_id]
        num_new_blocks = self._required_blocks(request_id, num_tokens) - len(req_blocks)
        if num_new_blocks <= 0:
            return []
        new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
        req_blocks.extend(new_blocks)
        if self._record_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in new_blocks)
        source = self._to_copy.pop(request_id, None)
        if source is not None:
            # The scheduler releases both ends once the copy has run, hence the extra reference.
            self._pending_cow_copies.append((source, new_blocks[0]))
            new_blocks[0].ref_cnt += 1
        return new_blocks

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        kv = self.requests.get(request.request_id)
        if kv is None or kv.anchor_hash is None or num_tokens < kv.anchors:
            return
        blocks = self.req_to_blocks.get(request.request_id)
        if blocks and blocks[0].block_hash is None:
            self._to_publish.setdefault(request.request_id, kv.anchor_hash)

    def new_step_starts(self) -> None:
        """Publishes anchors that the previous step computed.

        Not earlier: copies run before a step's forward pass, so a request scheduled in the same
        step as the one that computes the anchors would copy an unwritten block.
        """
        super().new_step_starts()
        for request_id, anchor_hash in self._to_publish.items():
            blocks = self.req_to_blocks.get(request_id)
            if not blocks or blocks[0].block_hash is not None:
                continue
            if self.find_anchors(anchor_hash) is None:
                key = make_block_hash_with_group_id(anchor_hash, self.kv_cache_group_id)
                self.block_pool._insert_block_hash(key, blocks[0], num_tokens=self.block_size)
        self._to_publish.clear()

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._to_publish.pop(request_id, None)
        source = self._to_copy.pop(request_id, None)
        blocks = super().pop_blocks_for_free(request_id)
        return blocks if source is None else [*blocks, source]

    @classmethod
    def find_longest_cache_hit(cls, *args, **kwargs):
        raise AssertionError("groups of a policy segment take no part in prefix lookups")


def anchor_hash(token_ids: Sequence[int], salt: str | None) -> BlockHash:
    """Key of the anchors' entries: their tokens, and the request's cache salt."""
    payload = repr(("kvx-anchors", list(token_ids), salt)).encode()
    return BlockHash(hashlib.sha256(payload).digest())


# The registry fills itself only while it is empty, so vLLM's own specs have to go in first.
register_all_kvcache_specs(None)
KVCacheSpecRegistry.register(LowerAttentionSpec, FullAttentionManager, FullAttentionSpec)
KVCacheSpecRegistry.register(PolicyAttentionSpec, PolicyKVCacheManager, PolicyAttentionSpec)
