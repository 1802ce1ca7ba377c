"""Decoders that run in passes over ranges of layers, each on its own set of rows.

Between two passes the rows whose layers end there leave the batch: what goes on is gathered, the
next layers' attention runs on its own slots and metadata, and at the end the result is scattered
back to the batch's rows. Which passes a step has, the worker says (``passes``). A step with no row
to drop (every decode step) runs the stock decoder instead, with its own compiled graph and CUDA
graphs. Passes run ranges of that decoder's compiled code (``compiled_ranges``); where it has none,
segments of their own (``segment``), which round differently.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.sequence import IntermediateTensors

from vllm_kvx.config.disabled import COMPILED_RANGES, disabled_parts
from vllm_kvx.models.adapters import AdapterRows
from vllm_kvx.models.attention import every_layer
from vllm_kvx.models.compiled_ranges import CompiledRanges
from vllm_kvx.models.hooked import HookedModel
from vllm_kvx.models.layer_ranges import TRIED, LayerRanges
from vllm_kvx.models.passes import (
    AdapterSelection,
    BatchRows,
    Pass,
    Previous,
    RequestRows,
    Stashed,
    ToEntries,
    TokenIds,
    ToStash,
)
from vllm_kvx.models.position_rows import PositionRows
from vllm_kvx.models.segment import Segments
from vllm_kvx.models.stitching import UnknownForm
from vllm_kvx.models.stream import Out, Stream, rows_of
from vllm_kvx.models.wrappers import check_wrapper

logger = init_logger("vllm.kvx.models")


class SegmentedModel(HookedModel):
    """Mixin over a vLLM model whose decoder runs in passes over ranges of its layers."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        build = HookedModel.build
        self._dtype: torch.dtype = vllm_config.model_config.dtype  # type: ignore[assignment]
        num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        hidden_size = vllm_config.model_config.get_hidden_size()
        attention = every_layer(vllm_config, self.attention_layers(), num_layers)
        rows = PositionRows.of_model(vllm_config)
        self.ranges = LayerRanges(self, attention, hidden_size, self._dtype, rows)
        row_cuts = build.row_cuts(attention)
        self.segments = Segments(self.ranges, row_cuts, build.online_cuts, vllm_config, prefix)
        self._captured_sizes: set[int] = set()
        # In the place of segments, once the stock decoder is compiled.
        self.compiled_ranges: CompiledRanges | None = None
        is_disabled = COMPILED_RANGES in disabled_parts(vllm_config.additional_config)
        do_not_compile = getattr(self.ranges.decoder, "do_not_compile", True)
        self._may_have_compiled_ranges = not (do_not_compile or is_disabled)
        is_compiled = vllm_config.compilation_config.mode != CompilationMode.NONE
        if self.segments and do_not_compile and is_compiled and not is_disabled:
            logger.warning(
                "Layers are compiled for prompts, and the server starts later: vLLM does not "
                "compile %s by itself.",
                type(self.ranges.decoder).__name__,
            )

    def every_layer(self) -> list[Attention]:
        return list(self.ranges.attention)

    def weights_are_loaded(self) -> None:
        """Finds what the residual stream is, and the adapters' buffers if there are any.

        Raises:
            NoRanges: it cannot be told, or a model around the decoder does something of its own.
        """
        if supports_multimodal(self):
            check_wrapper(self, super().forward, self.ranges)
        self.ranges.adapters = AdapterRows.of(self)
        firsts = sorted({first for edges in self.segments.edges for first in edges[1:-1]})
        device = next(self.parameters()).device
        with self._without_adapters():
            self.ranges.find_residual(firsts, self._dtype, device)

    def check_ranges(self, projected: Sequence[int]) -> None:
        """Runs some tokens through every way that the decoder is cut.

        Inside vLLM's forward context, which experts read, and once these can run.

        Args:
            projected: layers whose entries are made without running the layers below.

        Raises:
            NoRanges: they do not make up the decoder.
        """
        device = next(self.parameters()).device
        with self._without_adapters():
            for edges in self.segments.edges:
                self.ranges.check_ranges(edges, projected, device)

    def _without_adapters(self) -> AbstractContextManager[None]:
        """Inside, LoRA layers see the rows that try a range."""
        adapters = self.ranges.adapters
        return nullcontext() if adapters is None else adapters.none(TRIED)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `forward` takes the plan, and enters its hooks itself.
        return nn.Module.__call__(self, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """(T,) ids and positions -> (T, H) final states; rows dropped on the way are 0.

        positions: (R, T) where the decoder takes R a token; those of a text are equal.
        """
        plan = self.take_plan()
        if plan.passes is None:
            with plan.hooks:
                return self._run_stock(input_ids, positions, intermediate_tensors, inputs_embeds)
        assert input_ids is not None
        output: Tensor | None = None
        out: Out | None = None
        adapters = _NoAdapters() if plan.adapters is None else plan.adapters
        for now in plan.passes:
            adapters.select(now.requests)
            with now.hooks:
                out = self._run_pass(now, out, input_ids, positions)
            output = self._write(now, out, output, positions.shape[-1], adapters)
        # vLLM maps the rows of the next step only if they are other ones.
        adapters.select(None)
        return self._zeros(positions) if output is None else output

    def _run_pass(self, now: Pass, before: Out | None, input_ids: Tensor, positions: Tensor) -> Out:
        source = now.source
        ids: Tensor | None = None
        stream: Stream | None = None
        takes_batch = isinstance(source, BatchRows) and source.rows is None
        if isinstance(source, BatchRows):
            rows = source.rows
            ids = input_ids if rows is None else input_ids.index_select(0, rows)
        elif isinstance(source, TokenIds):
            ids = source.ids
        elif isinstance(source, Previous):
            assert isinstance(before, Stream)
            stream = before
            if source.rows is not None:
                stream = before.select(source.rows)
                before.release()
        elif isinstance(source, Stashed):
            stream = Stream((source.states.index_select(0, source.rows),))
        at = positions if now.positions is None else now.positions
        # A size without captured pieces would be captured now, amid serving, which CUDA refuses.
        captured = takes_batch and at.shape[-1] in self._captured_sizes
        context = without_graphs(now.slot_mapping)
        if now.attn_metadata is not None:
            context = replace(context, attn_metadata=now.attn_metadata)
        with nullcontext() if captured else override_forward_context(context):
            return self._runs.run(now.first, now.last, ids, at, stream)

    def _write(
        self,
        now: Pass,
        out: Out,
        output: Tensor | None,
        num_tokens: int,
        adapters: AdapterSelection,
    ) -> Tensor | None:
        """Puts the pass's output where it goes; the step's output so far, None before any."""
        for sink in now.sinks:
            if isinstance(sink, ToEntries):
                assert isinstance(out, Stream)
                self._project(sink, out, now.last, adapters)
                continue
            if isinstance(sink, ToStash):
                assert isinstance(out, Stream)
                sink.states.index_copy_(0, sink.targets, out.sum(sink.rows))
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

    def _project(
        self, sink: ToEntries, out: Stream, layer: int, adapters: AdapterSelection
    ) -> None:
        """layer: the one above the pass, which may have its entries and queries made already."""
        wanted = sink.queries
        states = asked = None
        with nullcontext() if wanted is None else wanted.hooks:
            for number in range(sink.first, sink.last):
                attention = self.ranges.attention[number]
                slots = sink.slot_mapping[attention.layer_name]
                made = out.projected if number == layer else None
                if made is not None:
                    key, value = (rows_of(part, sink.rows) for part in (made.key, made.value))
                    write_entries(attention, key, value, slots)
                else:
                    states = out.sum(sink.rows) if states is None else states
                    adapters.select(sink.requests)
                    of_rows = self.ranges.projected(number, (states,), sink.positions)
                    write_entries(attention, of_rows.key, of_rows.value, slots)
                if wanted is None:
                    continue
                if made is not None and made.query.dtype == self._dtype:
                    query = made.query.index_select(0, wanted.rows)
                else:
                    asked = out.sum(wanted.rows) if asked is None else asked
                    adapters.select(wanted.requests)
                    query = self.ranges.projected(
                        number, (asked,), wanted.positions, quantizes=False
                    ).query
                wanted.run(number, query)

    def _zeros(self, positions: Tensor) -> Tensor:
        shape = positions.shape[-1], self.ranges.hidden_size
        return torch.zeros(shape, dtype=self._dtype, device=positions.device)

    def _run_stock(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None,
    ) -> Tensor:
        context = get_forward_context()
        if not self.segments:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        is_profiling = context.attn_metadata is None
        if (
            self._is_dummy_step
            and not is_profiling
            and context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        ):
            # Small prefills replay the first pieces, captured here: stock ones by the stock decoder
            # below, the first segment's beside them.
            if self.compiled_ranges is None:
                self.segments.run_first(input_ids, positions)
            self._captured_sizes.add(positions.shape[-1])
        out = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        if is_profiling and input_ids is not None:
            del out
            with override_forward_context(without_graphs({})):
                out = self._profile(input_ids, positions)
        return out

    def _profile(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Runs what can run later: it has to be compiled, and its memory counted.

        After the stock decoder, whose compiled pieces are there then.
        """
        if self.compiled_ranges is None and self._may_have_compiled_ranges:
            self._may_have_compiled_ranges = False
            forward = super().forward
            why: object = "another rank has none"
            try:
                self.compiled_ranges = CompiledRanges(
                    self.ranges, lambda ids, at: forward(ids, at, None, None)
                )
            except UnknownForm as problem:
                why = problem
            # Ranks run the same ranges, or would wait for each other for ever.
            if _all_ranks(self.compiled_ranges is not None):
                out: Tensor | None = None
                try:
                    out = self._run_cuts(input_ids, positions)
                except UnknownForm as problem:
                    why = problem
                assert self.compiled_ranges is not None
                why = self.compiled_ranges.problem or why
                is_well = out is not None and not self.compiled_ranges.problem
                if _all_ranks(is_well) and out is not None:
                    return out
            if self.compiled_ranges is not None:
                self.compiled_ranges.give_back()
                self.compiled_ranges = None
            logger.warning(
                "Layers are compiled a second time, for prompts, and the server starts later: "
                "the stock decoder's compiled pieces cannot be used, since %s.",
                why,
            )
        return self._run_cuts(input_ids, positions)

    def _run_cuts(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """All layers, in passes of every kind; each row is copied wherever rows may leave."""
        rows = torch.arange(positions.shape[-1], device=positions.device)
        for edges in self.segments.edges:
            stream: Stream | None = None
            for first, last in pairwise(edges):
                ids = None if first else input_ids
                out = self._runs.run(first, last, ids, positions, stream)
                if isinstance(out, Stream):
                    stream = out.select(rows)
                    out.release()
        assert isinstance(out, Tensor)
        return out

    @property
    def _runs(self) -> Segments | CompiledRanges:
        """What runs ranges of layers."""
        return self.segments if self.compiled_ranges is None else self.compiled_ranges


class _NoAdapters:
    """Of a step without adapters: there is nothing to map."""

    def select(self, rows: RequestRows | None) -> None:
        pass


def write_entries(attention: Any, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Writes keys and values, (n, KV heads, D), that a layer has made, into its KV cache."""
    attention.impl.do_kv_cache_update(attention, key, value, attention.kv_cache, slots)


def _all_ranks(has: bool) -> bool:
    """Whether every tensor-parallel rank `has` something; all of them ask."""
    group = get_tp_group()
    if group.world_size == 1:
        return has
    flag = torch.tensor([int(has)], dtype=torch.int32)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(flag.item())


def without_graphs(slot_mapping: dict[str, Tensor]) -> ForwardContext:
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
