"""Decoders that run in passes over ranges of layers, each on its own set of rows.

Between two passes the rows whose layers end there leave the batch: hidden state and residual are
gathered, the next layers' attention runs on its own slots and metadata, and at the end the result
is scattered back to the batch's rows. Which passes a step has, the worker says (``passes``). A step
with no row to drop (every decode step) runs the stock decoder instead, with its own compiled graph
and CUDA graphs: a cut through the compiled graph rounds differently.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.sequence import IntermediateTensors

from vllm_kvx.models.passes import (
    BatchRows,
    Pass,
    Previous,
    Stashed,
    StepPlan,
    ToEntries,
    TokenIds,
    ToStash,
)
from vllm_kvx.models.projection import queries_of, store_entries
from vllm_kvx.models.segment import Out, Segments


class Build(NamedTuple):
    """What the worker that loads a segmented model says of it.

    model_state: the class of vLLM's model state that goes with it.
    row_cuts: the layers where segments begin, of the model's attention layers; see ``Segments``.
    online_cuts: the same for passes that find their pivot meanwhile.
    """

    model_state: Callable[..., Any]
    row_cuts: Callable[[Sequence[Attention]], Sequence[int]]
    online_cuts: tuple[int, ...]


class SegmentedModel(nn.Module):
    """Mixin over a vLLM ``*ForCausalLM`` that runs ``self.model`` in passes.

    build: set before a model is loaded; vLLM makes the model itself.
    """

    build: ClassVar[Build]
    model: Any
    _plan: StepPlan
    _is_dummy_step: bool

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        build = SegmentedModel.build
        self._model_state = build.model_state
        row_cuts = build.row_cuts(self.attention_layers())
        self.segments = Segments(self.model, row_cuts, build.online_cuts, vllm_config, prefix)
        self._dtype: torch.dtype = vllm_config.model_config.dtype  # type: ignore[assignment]
        self._captured_sizes: set[int] = set()
        self.begin_step(StepPlan())

    def attention_layers(self) -> list[Attention]:
        """The attention layer of every decoder layer, in order."""
        return [_attention_of(layer) for layer in self.model.layers]

    def output_projections(self) -> list[nn.Module]:
        """What projects the output of each layer's attention, in order."""
        return [layer.self_attn.o_proj for layer in self.model.layers]

    def begin_step(self, plan: StepPlan) -> None:
        """Says what the next forward pass runs.

        Whether it is a dummy step holds until the next one begins: vLLM warms up and captures with
        one preparation.
        """
        # Past ``nn.Module``, which would look among its parameters for both, in every step.
        self.__dict__.update(_plan=plan, _is_dummy_step=plan.is_dummy)

    def get_model_state_cls(self) -> Callable[..., Any]:
        return self._model_state

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """(T,) ids and positions -> (T, H) final states; rows dropped on the way are 0."""
        # Consumed once: a dummy run that prepares no attention must not see an old plan.
        plan, self._plan = self._plan, StepPlan()
        if plan.passes is None:
            with plan.beside:
                return self._run_stock(input_ids, positions, intermediate_tensors, inputs_embeds)
        assert input_ids is not None
        output: Tensor | None = None
        out: Out | None = None
        for now in plan.passes:
            with now.beside:
                out = self._run_pass(now, out, input_ids, positions)
            output = self._write(now, out, output, positions.shape[0])
        return self._zeros(positions) if output is None else output

    def _run_pass(self, now: Pass, before: Out | None, input_ids: Tensor, positions: Tensor) -> Out:
        source = now.source
        ids: Tensor | None = None
        states: tuple[Tensor | None, Tensor | None] = (None, None)
        takes_batch = isinstance(source, BatchRows) and source.rows is None
        if isinstance(source, BatchRows):
            rows = source.rows
            ids = input_ids if rows is None else input_ids.index_select(0, rows)
        elif isinstance(source, TokenIds):
            ids = source.ids
        elif isinstance(source, Previous):
            assert isinstance(before, tuple)
            hidden, residual = before
            if source.rows is not None:
                hidden, residual = (part.index_select(0, source.rows) for part in before)
            states = hidden, residual
        elif isinstance(source, Stashed):
            hidden = source.states.index_select(0, source.rows)
            # The stash holds the sum already; the compiled segment wants both terms.
            states = hidden, torch.zeros_like(hidden)
        at = positions if now.positions is None else now.positions
        # A size without captured pieces would be captured now, amid serving, which CUDA refuses.
        captured = takes_batch and at.shape[0] in self._captured_sizes
        context = _without_graphs(now.slot_mapping)
        if now.attn_metadata is not None:
            context = replace(context, attn_metadata=now.attn_metadata)
        with nullcontext() if captured else override_forward_context(context):
            for segment in self.segments.path(now.first, now.last):
                out: Out = segment(ids, at, *states)
                ids = None
                if isinstance(out, tuple):
                    states = out
        return out

    def _write(self, now: Pass, out: Out, output: Tensor | None, num_tokens: int) -> Tensor | None:
        """Puts the pass's output where it goes; the step's output so far, None before any."""
        for sink in now.sinks:
            if isinstance(sink, ToEntries):
                self._project(sink, out)
                continue
            if isinstance(sink, ToStash):
                sink.states.index_copy_(0, sink.targets, _sum_of(out, sink.rows))
                continue
            assert isinstance(out, Tensor)
            if sink.in_batch is None:
                assert output is None, "the whole output is written once, and first"
                output = out
                continue
            if output is None:
                output = out.new_zeros(num_tokens, out.shape[1])
            rows = out if sink.rows is None else out.index_select(0, sink.rows)
            output.index_copy_(0, sink.in_batch, rows)
        return output

    def _project(self, sink: ToEntries, out: Out) -> None:
        states, wanted = _sum_of(out, sink.rows), sink.queries
        asked = None if wanted is None else _sum_of(out, wanted.rows)
        with nullcontext() if wanted is None else wanted.beside:
            for number in range(sink.first, sink.last):
                layer = self.model.layers[number]
                slots = sink.slot_mapping[_attention_of(layer).layer_name]
                store_entries(layer, states, sink.positions, slots)
                if wanted is not None and asked is not None:
                    wanted.run(number, queries_of(layer, asked, wanted.positions))

    def _zeros(self, positions: Tensor) -> Tensor:
        hidden = self.model.config.hidden_size
        return torch.zeros(positions.shape[0], hidden, dtype=self._dtype, device=positions.device)

    def _run_stock(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None,
    ) -> Tensor:
        context = get_forward_context()
        if self.segments and context.attn_metadata is None:
            # The profiling run: what can run later has to be compiled, and its memory counted.
            for segments in self.segments.each_cut():
                ids, out = input_ids, (None, None)
                with override_forward_context(_without_graphs({})):
                    for segment in segments:
                        ids, out = None, segment(ids, positions, *out)
        elif (
            self.segments
            and self._is_dummy_step
            and context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        ):
            # Small prefills replay the first segment's pieces; captured here beside the stock ones.
            self.segments.first(input_ids, positions, None, None)
            self._captured_sizes.add(positions.shape[0])
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)


def _sum_of(out: Out, rows: Tensor | None) -> Tensor:
    """The residual stream after a pass, (n, H): of all of its rows, or of `rows`, (n,) int64."""
    assert isinstance(out, tuple)
    hidden, residual = out
    if rows is not None:
        hidden, residual = hidden.index_select(0, rows), residual.index_select(0, rows)
    return hidden + residual


def _without_graphs(slot_mapping: dict[str, Tensor]) -> ForwardContext:
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
