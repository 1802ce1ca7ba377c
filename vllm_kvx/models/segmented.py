"""Decoders that run in segments of layers, each on its own set of rows.

A segment is a range of decoder layers compiled on its own. Between two segments the rows whose
layers end there leave the batch: hidden state and residual are gathered, the next segment's
attention runs on its own slots and metadata, and at the end the result is scattered back to the
batch's rows. A step with no row to drop (every decode step) runs the stock decoder instead, with
its own compiled graph and CUDA graphs: a cut through the compiled graph rounds differently.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.sequence import IntermediateTensors

from vllm_kvx.cache.policy_cache import policy_kv_cache_specs
from vllm_kvx.settings import KVSettings


@dataclass
class StepRows:
    """Rows that one segment runs in the current step.

    Attributes:
        from_previous: (N,) int64 rows of the previous segment's output.
        in_batch: (N,) int64 rows of the whole batch.
        positions: (N,) int64 token positions.
        slot_mapping: (N,) int64 slots per attention layer of the segment, by layer name.
    """

    from_previous: torch.Tensor
    in_batch: torch.Tensor
    positions: torch.Tensor
    slot_mapping: dict[str, torch.Tensor]

    @property
    def num_rows(self) -> int:
        return self.in_batch.shape[0]


class DecoderSegment(nn.Module):
    """Layers ``[start, end)`` of a decoder; the first embeds, the last normalises."""

    layers: list[nn.Module]
    embed: nn.Module | None
    norm: nn.Module | None

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", decoder: Any, start: int, end: int
    ) -> None:
        super().__init__()
        # Plain references: the decoder stays the owner of its modules and of their names.
        self.__dict__["layers"] = list(decoder.layers[start:end])
        self.__dict__["embed"] = decoder.embed_tokens if start == 0 else None
        self.__dict__["norm"] = decoder.norm if end == len(decoder.layers) else None

    def run(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> Any:
        """(N,) ids or (N, hidden) states -> states and residual, or normed states at the end."""
        if self.embed is not None:
            hidden_states = self.embed(input_ids)
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        if self.norm is not None:
            hidden_states, _ = self.norm(hidden_states, residual)
            return hidden_states
        return hidden_states, residual


def compiled_segment(index: int) -> type[DecoderSegment]:
    """A class for the segment at this place.

    vLLM finds a compiled artifact by the qualified name of ``forward``, so two segments of one
    class would load each other's.
    """

    class Segment(DecoderSegment):
        def forward(
            self,
            input_ids: torch.Tensor | None,
            positions: torch.Tensor,
            hidden_states: torch.Tensor | None,
            residual: torch.Tensor | None,
        ) -> Any:
            return self.run(input_ids, positions, hidden_states, residual)

    Segment.__qualname__ = Segment.__name__ = f"Segment{index}"
    Segment.forward.__qualname__ = f"Segment{index}.forward"
    dims: dict[str, Any] = {"input_ids": 0, "positions": 0, "hidden_states": 0, "residual": 0}
    return support_torch_compile(dynamic_arg_dims=dims)(Segment)


class SegmentedModel(nn.Module):
    """Mixin over a vLLM ``*ForCausalLM`` that runs ``self.model`` in segments."""

    model: Any
    segments: nn.ModuleList

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        settings = KVSettings.from_vllm_config(vllm_config)
        assert settings is not None, "segmented models are loaded under a KV policy only"
        decoder = self.model
        bounds = (0, *settings.layout.splits, len(decoder.layers))
        segments = []
        for index, (start, end) in enumerate(pairwise(bounds)):
            with set_model_tag(f"kvx_segment_{index}"):
                segments.append(
                    compiled_segment(index)(
                        vllm_config=vllm_config,
                        prefix=f"{prefix}.segments.{index}",
                        decoder=decoder,
                        start=start,
                        end=end,
                    )
                )
        self.segments = nn.ModuleList(segments)
        self._captured_sizes: set[int] = set()
        self.begin_step((), is_dummy=False)
        attention = [_attention_of(layer) for layer in decoder.layers]
        policy_kv_cache_specs(attention, settings)

    def begin_step(self, rows: Sequence[StepRows | None], is_dummy: bool) -> None:
        """Says what the next forward pass runs.

        Args:
            rows: those of every segment above the first; None runs all of the batch.
            is_dummy: the step captures graphs or warms up. Holds until the next step begins: vLLM
                warms up and captures with one preparation.
        """
        self._step_rows, self._is_dummy_step = rows, is_dummy

    def get_model_state_cls(self) -> type:
        from vllm_kvx.worker.model_state import PolicyModelState

        return PolicyModelState

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(T,) ids and positions -> (T, hidden) final states; rows dropped on the way are 0."""
        # Consumed once: a dummy run that prepares no attention must not see an old plan.
        step_rows, self._step_rows = self._step_rows, ()
        if any(rows is not None for rows in step_rows):
            return self._run_segments(input_ids, positions, step_rows)
        context = get_forward_context()
        if context.attn_metadata is None:
            # The profiling run: what can run later has to be compiled, and its memory counted.
            self._run_segments(input_ids, positions, [None] * (len(self.segments) - 1))
        elif self._is_dummy_step and context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE:
            # Small prefills replay the first segment's pieces; captured here beside the stock ones.
            self.segments[0](input_ids, positions, None, None)
            self._captured_sizes.add(positions.shape[0])
        return super().forward(
            input_ids, positions, intermediate_tensors, inputs_embeds
        )

    def _run_segments(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        step_rows: Sequence[StepRows | None],
    ) -> torch.Tensor:
        num_tokens = positions.shape[0]
        # A size without captured pieces would be captured now, amid serving, which CUDA refuses.
        captured = num_tokens in self._captured_sizes
        with nullcontext() if captured else override_forward_context(_without_graphs({})):
            out = self.segments[0](input_ids, positions, None, None)
        in_batch: torch.Tensor | None = None
        for rows, segment in zip(step_rows, self.segments[1:], strict=True):
            hidden, residual = out
            slot_mapping: dict[str, torch.Tensor] = {}
            if rows is not None:
                if rows.num_rows == 0:
                    return hidden.new_zeros(num_tokens, hidden.shape[1])
                hidden = hidden.index_select(0, rows.from_previous)
                residual = residual.index_select(0, rows.from_previous)
                positions, in_batch, slot_mapping = rows.positions, rows.in_batch, rows.slot_mapping
            with override_forward_context(_without_graphs(slot_mapping)):
                out = segment(None, positions, hidden, residual)
        if in_batch is None:
            return out
        output = out.new_zeros(num_tokens, out.shape[1])
        return output.index_copy_(0, in_batch, out)


def _without_graphs(slot_mapping: dict[str, torch.Tensor]) -> Any:
    """The forward context with these slots; rows vary per step, so no piecewise CUDA graph."""
    context = get_forward_context()
    assert isinstance(context.slot_mapping, dict)
    return replace(
        context,
        slot_mapping={**context.slot_mapping, **slot_mapping},
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
        batch_descriptor=None,
        is_padding=None,
    )


def _attention_of(layer: nn.Module) -> Attention:
    found = [module for module in layer.modules() if isinstance(module, Attention)]
    assert len(found) == 1, f"expected one attention per layer, found {len(found)}"
    return found[0]


class SegmentedLlamaForCausalLM(SegmentedModel, LlamaForCausalLM):
    """Llama in segments."""


class SegmentedMistralForCausalLM(SegmentedModel, MistralForCausalLM):
    """Mistral in segments."""


class SegmentedQwen2ForCausalLM(SegmentedModel, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5 in segments."""


class SegmentedQwen3ForCausalLM(SegmentedModel, Qwen3ForCausalLM):
    """Qwen3 in segments."""
