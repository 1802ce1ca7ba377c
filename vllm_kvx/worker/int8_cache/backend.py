"""An attention backend of vLLM for entries in 8 bits, with a scale for each token and KV head.

vLLM's own for this dtype keeps the scales between the entries, where no kernel loads fast, and
undoes a context's entries for every row of a prompt. Here scales are in the page's tail, behind the
sidecar of retrieval (``PagedKV``). Rows that decode run the operator that retrieval attends with,
over all entries (``AllEntries``), and CUDA graphs hold it. Prompts attend to what the entries stand
for: ``prefill``. In float32, which FlashAttention does not take, they run vLLM's Triton kernel,
which takes the strides of entries and scales, and on a CPU, where nothing compiles, torch.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvx.ops.int8.store import store
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.all_entries import AllEntries
from vllm_kvx.policy.cache_dtype import INT8, INT8_CAPABILITY
from vllm_kvx.worker.int8_cache.pieces import NOTHING, Plan, plan_of, undone_together
from vllm_kvx.worker.int8_cache.prefill import Softmax, attend_undone
from vllm_kvx.worker.int8_cache.room import short_rows

# Of a power of two, as kernels take them.
HEAD_DIMS = (32, 64, 128, 256)
# As vLLM calls a backend that is not its own.
NAME = "CUSTOM"


@dataclass
class Int8Metadata(TritonAttentionMetadata):
    """Of one batch.

    undone: what of it attends to undone entries. bounds: `Plan.bounds` on the device.
    beside: of the requests before those; None where all requests are.
    """

    undone: Plan = NOTHING
    bounds: Tensor | None = None
    beside: TritonAttentionMetadata | None = None

    def __post_init__(self) -> None:
        plan = self.undone
        self.beside = None
        if plan.chunks and plan.num_rows:
            self.beside = replace(
                self,
                num_actual_tokens=plan.num_rows,
                max_query_len=plan.longest,
                query_start_loc=self.query_start_loc[: plan.num_requests + 1],
                seq_lens=self.seq_lens[: plan.num_requests],
                block_table=self.block_table[: plan.num_requests],
                undone=NOTHING,
            )


class Int8MetadataBuilder(TritonAttentionMetadataBuilder):
    """Builds `Int8Metadata`.

    short: a request with so many rows, or fewer, is read as it is stored.
    together: entries of several requests that are undone at once, at most.
    """

    # A graph of a batch with a prompt would hold attention of that prompt's length.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        max_rows = vllm_config.scheduler_config.max_num_batched_tokens
        dtype = cast(torch.dtype, vllm_config.model_config.dtype)
        self.short = short_rows(device.type, dtype, max_rows)
        self.together = undone_together(vllm_config.model_config.max_model_len, max_rows)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Int8Metadata:
        common = common_attn_metadata
        stock = super().build(common_prefix_len, common, fast_build)
        of_stock = {each.name: getattr(stock, each.name) for each in fields(stock)}
        if common.max_query_len <= max(self.short, 1):
            return Int8Metadata(**of_stock)
        lens = common.seq_lens_cpu_upper_bound
        # Of prompts the bound is the length.
        assert lens is not None, "the lengths of a batch are known on the host"
        starts = common.query_start_loc_cpu.tolist()
        of_requests = starts, lens.tolist()[: len(starts) - 1]
        undone = plan_of(*of_requests, self.block_size, self.short, together=self.together)
        bounds = async_tensor_h2d(list(undone.bounds), dtype=torch.int32, device=self.device)
        return Int8Metadata(**of_stock, undone=undone, bounds=bounds)

    def update_block_table(
        self, metadata: TritonAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> TritonAttentionMetadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class Int8AttentionImpl(TritonAttentionImpl):
    """Attention of one layer.

    sidecar_bytes: of each page, between its entries and its scales; all_entries: how rows that
    decode attend. Both are set before there is a cache.
    """

    all_entries: AllEntries

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sidecar_bytes = 0
        self._seen: tuple[Tensor, PagedKV] | None = None
        self._version: int | None = None
        if not current_platform.is_cpu():
            from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

            self._version = get_flash_attn_version(
                head_size=self.head_size, requires_softcap=bool(self.logits_soft_cap)
            )

    def paged(self, kv_cache: Tensor) -> PagedKV:
        """Keys, values and their scales in (num_blocks, G, block_size, 2 D) int8."""
        # Every layer of every step asks.
        if self._seen is None or self._seen[0] is not kv_cache:
            # Whoever asks first, views are read within inference mode and outside.
            with torch.inference_mode(False):
                paged = PagedKV.of_int8(kv_cache, self.head_size, self.sidecar_bytes)
            self._seen = kv_cache, paged
        return self._seen[1]

    def _pth_key_value_caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, as vLLM's kernel takes them; sets their scales beside."""
        paged = self.paged(kv_cache)
        assert paged.key_scales is not None and paged.value_scales is not None
        self._k_scale_cache = paged.key_scales.transpose(1, 2)
        self._v_scale_cache = paged.value_scales.transpose(1, 2)
        return paged.keys.transpose(1, 2), paged.values.transpose(1, 2)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        store(self.paged(kv_cache), key, value, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TritonAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        more = output_scale, output_block_scale
        if attn_metadata is None:  # vLLM looks how much memory a step takes.
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *more)
        assert more == (None, None), "outputs of these layers are not quantized"
        metadata = cast(Int8Metadata, attn_metadata)
        plan = metadata.undone
        beside = metadata.beside if plan.chunks else metadata
        if beside is not None and beside.max_query_len == 1:
            # A row for each request; a CUDA graph has some for none, which see nothing.
            count = min(len(beside.seq_lens), len(query))
            self.all_entries.attend(
                query,
                self.paged(kv_cache),
                beside.block_table[:count],
                beside.seq_lens[:count],
                output,
                scale=self.scale,
                soft_cap=self.logits_soft_cap or None,
            )
        elif beside is not None:
            super().forward(layer, query, key, value, kv_cache, beside, output)
        softmax = Softmax(self.scale, self.logits_soft_cap)
        for chunk in plan.chunks:
            assert metadata.bounds is not None
            attend_undone(
                query,
                self.paged(kv_cache),
                metadata.block_table,
                chunk,
                metadata.bounds,
                output,
                softmax,
                self._version,
            )
        return output


class Int8AttentionBackend(TritonAttentionBackend):
    """vLLM's Triton backend with scales in the tails of pages."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [INT8]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        # Pages are made room in with the policies' (``cache.kv_cache_specs``).
        return spec

    @staticmethod
    def get_name() -> str:
        return NAME

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        # A CPU has none.
        return capability is None or tuple(capability) >= INT8_CAPABILITY

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_DIMS

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return Int8AttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return Int8MetadataBuilder


def register() -> str:
    """Registers the backend with vLLM, which finds it by its name from then on; its path."""
    path = f"{__name__}.{Int8AttentionBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    return path
