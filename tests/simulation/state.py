"""The project's model state, over stand-ins for what it takes of vLLM.

It plans and changes batches, block tables and attention metadata as on any server; none of these
reaches a device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.utils import AttentionGroup

from simulation.live import Ints
from vllm_kvx.models.passes import StepPlan
from vllm_kvx.worker.model_state import PolicyHybridModelState, PolicyModelState

if not torch.cuda.is_available():
    import vllm.v1.worker.cpu.shm  # noqa: F401  vLLM's stand-ins for pinned memory.

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32


@dataclass(frozen=True)
class Metadata:
    """What a layer's attention is told of a pass.

    requests: (P,) request states. starts: (P + 1,) first row of each. lens: (P,) entries that its
    last row sees. table: (P, B) its blocks. builder: keeps the plan of one batch, the last one that
    it was asked for. plan: which one this is; 0 without one.
    """

    requests: Ints
    starts: Ints
    lens: Ints
    table: Ints
    builder: "_Builder"
    plan: int

    @property
    def is_stale(self) -> bool:
        """Whether its plan is another batch's by now."""
        return self.plan not in (0, self.builder.plans)


class _NoModel:
    """What vLLM's model states do without a model or attention backends."""

    max_num_reqs: int

    def __init__(self, vllm_config: VllmConfig, model: Any, encoder_cache: None, device: Any):
        ModelState.__init__(cast(Any, self), vllm_config, model, encoder_cache, device)
        self.rope_state = self.prompt_embeds_state = None

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[Tensor, ...],
        slot_mappings: Tensor,
        attn_groups: list[list[Any]],
        *args: Any,
    ) -> dict[str, Metadata]:
        plans = any(
            builder.aot_schedule
            for parts in attn_groups
            for part in parts
            for builder in part.metadata_builders
        )
        # FlashAttention 3's plan has room for so many sequences.
        assert not plans or len(input_batch.idx_mapping_np) <= self.max_num_reqs
        return {
            name: metadata
            for group, parts in enumerate(attn_groups)
            for part in parts
            for metadata in [part.get_metadata_builder().build(input_batch, block_tables[group])]
            for name in part.layer_names
        }


class _DefaultState(_NoModel, DefaultModelState):  # type: ignore[misc]
    """What the project's model state inherits of vLLM's."""


class _HybridState(_NoModel, MambaHybridModelState):  # type: ignore[misc]
    """The same of a model with layers that keep a state.

    A state is carried along from block to block: where a step ends in another one than the step
    before it, the state goes there before the forward pass.

    copy_state: copies a block; the worker sets it.
    """

    copy_state: Callable[[int, int], None]

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, block_tables: Any) -> None:
        specs = [
            (g, group.kv_cache_spec) for g, group in enumerate(kv_cache_config.kv_cache_groups)
        ]
        self._aligned = {
            g: spec.block_size
            for g, spec in specs
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"
        }
        self._state_tables = block_tables
        # By request state, tokens that its last step ended with.
        self._ends: dict[int, int] = {}

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        self._ends[req_index] = new_req_data.num_computed_tokens

    def preprocess_state(self, input_batch: InputBatch, *args: Any) -> None:
        begins = input_batch.num_computed_tokens_np.tolist()
        counts = input_batch.num_scheduled_tokens.tolist()
        requests = input_batch.idx_mapping_np.tolist()
        for request, begin, count in zip(requests, begins, counts, strict=True):
            before, self._ends[request] = self._ends[request], begin + count
            for group, size in self._aligned.items():
                source, target = (before - 1) // size, (begin + count - 1) // size
                if before and source != target:
                    table = self._state_tables.block_tables[group].gpu[request]
                    self.copy_state(int(table[source]), int(table[target]))


class State(PolicyModelState, _DefaultState):
    """The model state; what it plans is in `decoder`."""

    def __init__(self, vllm_config: VllmConfig, decoder: "Decoder") -> None:
        super().__init__(vllm_config, cast(Any, decoder), None, torch.device("cpu"))


class StateOfHybrid(PolicyHybridModelState, _HybridState):
    """The same of a model with layers that keep a state."""

    def __init__(self, vllm_config: VllmConfig, decoder: "Decoder") -> None:
        super().__init__(vllm_config, cast(Any, decoder), None, torch.device("cpu"))


class Decoder:
    """What the model state asks of the model: its layers, and to take the plan of a step."""

    def __init__(self, numbers: range, sliding: Mapping[int, Any]) -> None:
        """numbers: of its layers. sliding: those of them that slide, by their numbers."""
        full = [n for n in numbers if n not in sliding]
        self.layers = [AttentionLayer(number) for number in full]
        by_number = dict(zip(full, self.layers, strict=True)) | dict(sliding)
        self._every = [by_number[number] for number in numbers]
        self._plan = StepPlan()
        # vLLM's, where it serves adapters.
        self.lora_manager: Any = None

    def attention_layers(self) -> list["AttentionLayer"]:
        return self.layers

    def every_layer(self) -> list[Any]:
        return self._every

    def output_projections(self) -> list[torch.nn.Module]:
        """One for all layers, since nothing asks for its values."""
        linear: Any = torch.nn.Linear(HEADS * HEAD_SIZE, 64, bias=False)
        linear.quant_method = SimpleNamespace(apply=lambda layer, rows: layer(rows))
        return [linear] * len(self.layers)

    def begin_step(self, plan: StepPlan) -> None:
        self._plan = plan

    def take_plan(self) -> StepPlan:
        """The plan, once."""
        plan, self._plan = self._plan, StepPlan()
        return plan


class AttentionLayer:
    """What the project reads of vLLM's attention layers."""

    kv_cache_torch_dtype = torch.float32
    kv_cache_dtype = "auto"
    kv_cache: torch.Tensor | None = None
    has_sink = False
    num_heads, num_kv_heads, head_size = HEADS, KV_HEADS, HEAD_SIZE

    def __init__(self, index: int) -> None:
        self.layer_name = f"layers.{index}.attn"
        self.impl = SimpleNamespace(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, scale=1.0, forward=None
        )
        self.attn_backend = SimpleNamespace(
            get_name=lambda: "TRITON_ATTN", forward_includes_kv_cache_update=False
        )

    def bind(self, num_blocks: int, block_size: int) -> None:
        """The shape of a cache, whose entries are the simulation's own."""
        shape = (num_blocks, KV_HEADS, block_size, 2 * HEAD_SIZE)
        self.kv_cache = torch.empty(shape, device="meta")

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        block_size = vllm_config.cache_config.block_size
        assert block_size is not None
        return FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            dtype=self.kv_cache_torch_dtype,
        )


def attention_groups(groups: Sequence[KVCacheGroupSpec]) -> Any:
    """By KV group, vLLM's attention groups: one, of a backend that takes blocks of any size.

    Their builders plan ahead, as FlashAttention 3's do.
    """
    return [
        []
        if not group.layer_names
        else [
            AttentionGroup(
                cast(Any, _Backend),
                group.layer_names,
                group.kv_cache_spec,
                number,
                metadata_builders=[cast(Any, _Builder())],
            )
        ]
        for number, group in enumerate(groups)
    ]


class _Backend:
    @staticmethod
    def get_name() -> str:
        return "SIMULATED"

    @staticmethod
    def get_supported_kernel_block_sizes(spec: Any = None) -> list[MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type:
        return _Builder


class _Builder:
    requires_block_table_width = False
    supports_update_block_table = True
    aot_schedule = True
    plans = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def build(self, batch: InputBatch, table: Tensor) -> Metadata:
        self.plans += self.aot_schedule
        return Metadata(
            batch.idx_mapping_np,
            batch.query_start_loc_np.astype(np.int64),
            batch.seq_lens.numpy().astype(np.int64),
            table.numpy().astype(np.int64),
            self,
            self.plans if self.aot_schedule else 0,
        )

    def update_block_table(self, metadata: Metadata, table: Tensor, slots: Tensor) -> Metadata:
        return replace(metadata, table=table.numpy().astype(np.int64))


class Tables:
    """vLLM's ``BlockTables`` on the host, as far as the model state uses them."""

    def __init__(self, block_sizes: Sequence[int], max_reqs: int, max_len: int) -> None:
        """block_sizes: by KV group."""
        width, num_groups = -(-max_len // min(block_sizes)) + 1, len(block_sizes)
        self.block_sizes = list(block_sizes)
        self.num_blocks = SimpleNamespace(np=np.zeros((num_groups, max_reqs), dtype=np.int32))
        self.block_tables = [
            SimpleNamespace(gpu=torch.zeros(max_reqs, width, dtype=torch.int32))
            for _ in range(num_groups)
        ]
        self._arrays = [table.gpu.numpy() for table in self.block_tables]
        addresses = [table.gpu.data_ptr() for table in self.block_tables]
        self.block_table_ptrs = torch.tensor(addresses, dtype=torch.uint64)
        self.block_table_strides = torch.full((num_groups,), width)
        self.block_sizes_tensor = torch.tensor(self.block_sizes, dtype=torch.int32)
        self.slot_mappings = torch.zeros(num_groups, 1, dtype=torch.int64)

    def append(self, request: int, new_blocks: Sequence[Sequence[int]], overwrite: bool) -> None:
        for group, blocks in enumerate(new_blocks):
            begin = 0 if overwrite else int(self.num_blocks.np[group, request])
            end = begin + len(blocks)
            self._arrays[group][request, begin:end] = blocks
            self.num_blocks.np[group, request] = end

    def gather(
        self, requests: Ints, owners: Ints, positions: Ints
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The tables of a batch, and its slots by position; what is past a table's end is block 0.

        requests: (R,) request states. owners, positions: (T,), by token its request's state.
        """
        tables = []
        for group, table in enumerate(self._arrays):
            held = self.num_blocks.np[group, requests, None]
            rows = np.where(np.arange(table.shape[1]) < held, table[requests], 0)
            tables.append(torch.from_numpy(rows))
        slots = [
            table[owners, positions // size].astype(np.int64) * size + positions % size
            for table, size in zip(self._arrays, self.block_sizes, strict=True)
        ]
        self.slot_mappings = torch.from_numpy(np.stack(slots))
        return tuple(tables), self.slot_mappings


def input_batch(
    names: list[str],
    requests: Ints,
    begins: Ints,
    counts: Ints,
    prefill_lens: Ints,
    drafts: Ints,
    token_ids: np.ndarray,
    known: Ints,
) -> InputBatch:
    """A step as vLLM's runner gives it to the model state.

    Args:
        names: of the requests; requests: (R,) their states.
        begins, counts: (R,) first position and tokens of each.
        prefill_lens: (R,) tokens that it came with. drafts: (R,) drafted ones among `counts`.
        token_ids: (request states, tokens).
        known: (R,) the most that `begins` can be, which is what the host knows: drafts of the step
            before may have been rejected.
    """
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(b, b + n) for b, n in zip(begins, counts, strict=True)])
    lens = torch.from_numpy((begins + counts).astype(np.int32))
    most = torch.from_numpy((known + counts).astype(np.int32))
    none = cast(Any, None)  # What the model state does not look at.
    return InputBatch(
        req_ids=names,
        num_reqs=len(names),
        num_reqs_after_padding=len(names),
        idx_mapping=torch.from_numpy(requests),
        idx_mapping_np=requests,
        expanded_idx_mapping=none,
        expanded_local_pos=none,
        num_scheduled_tokens=counts.astype(np.int32),
        num_tokens=len(positions),
        num_tokens_after_padding=len(positions),
        num_draft_tokens=int(drafts.sum()),
        num_draft_tokens_per_req=drafts.astype(np.int32) if drafts.any() else None,
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_np=starts,
        seq_lens=lens,
        seq_lens_cpu_upper_bound=most,
        dcp_local_seq_lens=None,
        num_computed_tokens_np=known.astype(np.int32),
        prefill_len_np=prefill_lens,
        num_computed_prefill_tokens_np=np.minimum(known, prefill_lens),
        is_prefilling_np=known < prefill_lens,
        has_prefill=bool((known < prefill_lens).any()),
        decode_graph_eligible=bool(((known >= prefill_lens) | (counts - drafts == 1)).all()),
        input_ids=torch.from_numpy(token_ids[np.repeat(requests, counts), positions]),
        positions=torch.from_numpy(positions),
        is_padding=none,
        logits_indices=none,
        cu_num_logits=none,
        cu_num_logits_np=none,
        has_structured_output_reqs=False,
        prompt_lens=None,
    )
