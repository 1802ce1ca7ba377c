"""Decoders that run in segments of layers, each on its own set of rows.

A segment is a range of decoder layers compiled on its own. Between two segments the rows whose
layers end there leave the batch: hidden state and residual are gathered, the next segment's
attention runs on its own slots and metadata, and at the end the result is scattered back to the
batch's rows. Where saliency chooses who goes on, the states of all wait in a stash until the
prompt is in; the chosen ones then run the upper segments in passes of their own. A step with no
row to drop (every decode step) runs the stock decoder instead, with its own compiled graph and
CUDA graphs: a cut through the compiled graph rounds differently.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

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

from vllm_kvx.cache.admission import num_split_windows
from vllm_kvx.cache.kv_cache_specs import policy_kv_cache_specs
from vllm_kvx.settings import KVSettings
from vllm_kvx.worker.decode.retrieval import RetrievalPass
from vllm_kvx.worker.layer_hooks import SegmentTap, Taps


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


@dataclass
class StashWrite:
    """States of one segment's output that wait: its rows, and their rows in the stash, (N,)."""

    rows: torch.Tensor
    targets: torch.Tensor


@dataclass
class SelectedPass:
    """One pass of selected tokens over the upper segments.

    Attributes:
        first_segment: where it begins.
        stash_rows: (N,) int64 rows of the stash.
        positions: (N,) int64 token positions.
        attn_metadata: by layer name. slot_mapping: (N,) int64 by layer name.
        taps: by segment; see ``Taps.current``.
        last_rows, in_batch: (F,) int64, last rows of prompts that end here, and the batch's rows
            for them.
    """

    first_segment: int
    stash_rows: torch.Tensor
    positions: torch.Tensor
    attn_metadata: dict[str, Any]
    slot_mapping: dict[str, torch.Tensor]
    taps: Sequence[SegmentTap | None] | None
    last_rows: torch.Tensor
    in_batch: torch.Tensor


@dataclass
class StepPlan:
    """What the next forward pass runs.

    Attributes:
        rows: those of every segment; None runs all of the batch.
        online: runs the prompts that find their pivot online, whose rows are in none of `rows`;
            called with the model, ids, positions and the output.
        is_empty: there is nothing but these.
        retrieval: what the rows of the batch retrieve; see ``Taps.retrieval_pass``.
        is_dummy: the step captures graphs or warms up.
        taps: by segment; None if the step brings no prompt in.
        stash: (S, hidden) the stash; writes: what goes into it, by segment.
        selected: passes over upper segments, made one by one once the direct pass has run: only
            then is it known on the device which tokens they run, and backends keep the metadata
            of one batch at a time.
    """

    rows: Sequence[StepRows | None] = ()
    is_dummy: bool = False
    taps: Sequence[SegmentTap | None] | None = None
    stash: torch.Tensor | None = None
    writes: Sequence[StashWrite | None] = ()
    selected: Sequence[Callable[[], SelectedPass]] = field(default_factory=list)
    online: Callable[..., None] | None = None
    is_empty: bool = False
    retrieval: RetrievalPass | None = None


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
        self.pieces = self._make_pieces(settings.layout.online_cuts, vllm_config, prefix)
        self._captured_sizes: set[int] = set()
        self.begin_step(StepPlan())
        attention = [_attention_of(layer) for layer in decoder.layers]
        policy_kv_cache_specs(attention, settings)
        self.taps = Taps(
            attention,
            settings.layout.stage_sizes(len(attention)),
            num_split_windows(settings, vllm_config.scheduler_config),
            settings.layout.window,
            cast(torch.dtype, vllm_config.model_config.dtype),
            cast(torch.device, vllm_config.device_config.device),
        )

    def _make_pieces(
        self, cuts: Sequence[int], vllm_config: VllmConfig, prefix: str
    ) -> dict[int, tuple[int, DecoderSegment]]:
        """By first layer, segments between `cuts` and where they end: see ``run_layers``."""
        pieces: dict[int, tuple[int, DecoderSegment]] = {}
        if not cuts:
            return pieces
        for start, end in pairwise((0, *cuts, len(self.model.layers))):
            index = len(self.segments) + len(pieces)
            with set_model_tag(f"kvx_segment_{index}"):
                piece = compiled_segment(index)(
                    vllm_config=vllm_config,
                    prefix=f"{prefix}.segments.{index}",
                    decoder=self.model,
                    start=start,
                    end=end,
                )
            pieces[start] = end, piece
        return pieces

    def begin_step(self, plan: StepPlan) -> None:
        """Says what the next forward pass runs.

        Whether it is a dummy step holds until the next one begins: vLLM warms up and captures with
        one preparation.
        """
        self._plan, self._is_dummy_step = plan, plan.is_dummy

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
        plan, self._plan = self._plan, StepPlan()
        self.taps.current = plan.taps
        try:
            if plan.is_empty:
                assert plan.online is not None
                hidden = self.model.config.hidden_size
                output = torch.zeros(
                    positions.shape[0], hidden, dtype=self.taps.dtype, device=positions.device
                )
            elif any(rows is not None for rows in plan.rows):
                self.taps.retrieval_pass = plan.retrieval
                output = self._run_segments(input_ids, positions, plan)
                self.taps.retrieval_pass = None
                output = self._run_selected(output, plan)
            else:
                self.taps.retrieval_pass = plan.retrieval
                return self._run_stock(input_ids, positions, intermediate_tensors, inputs_embeds)
            if plan.online is not None:
                plan.online(self, input_ids, positions, output)
            return output
        finally:
            self.taps.current = self.taps.retrieval_pass = None

    def _run_stock(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        context = get_forward_context()
        if context.attn_metadata is None:
            # The profiling run: what can run later has to be compiled, and its memory counted.
            self._run_segments(input_ids, positions, StepPlan(rows=[None] * len(self.segments)))
            out: Any = (None, None)
            for start, (_, piece) in sorted(self.pieces.items()):
                with override_forward_context(_without_graphs({})):
                    out = piece(input_ids if start == 0 else None, positions, *out)
        elif self._is_dummy_step and context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE:
            # Small prefills replay the first segment's pieces; captured here beside the stock ones.
            self.segments[0](input_ids, positions, None, None)
            self._captured_sizes.add(positions.shape[0])
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    def _run_segments(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, plan: StepPlan
    ) -> torch.Tensor:
        num_tokens = positions.shape[0]
        in_batch: torch.Tensor | None = None
        slot_mapping: dict[str, torch.Tensor] = {}
        first = plan.rows[0]
        if first is not None:
            assert input_ids is not None
            input_ids = input_ids.index_select(0, first.in_batch)
            positions, in_batch, slot_mapping = first.positions, first.in_batch, first.slot_mapping
        # A size without captured pieces would be captured now, amid serving, which CUDA refuses.
        captured = first is None and num_tokens in self._captured_sizes
        with nullcontext() if captured else override_forward_context(_without_graphs(slot_mapping)):
            out = self.segments[0](input_ids, positions, None, None)
        _stash(plan, 0, out)
        for index, (rows, segment) in enumerate(
            zip(plan.rows[1:], self.segments[1:], strict=True), start=1
        ):
            hidden, residual = out
            slot_mapping = {}
            if rows is not None:
                if rows.num_rows == 0:
                    return hidden.new_zeros(num_tokens, hidden.shape[1])
                hidden = hidden.index_select(0, rows.from_previous)
                residual = residual.index_select(0, rows.from_previous)
                positions, in_batch, slot_mapping = rows.positions, rows.in_batch, rows.slot_mapping
            with override_forward_context(_without_graphs(slot_mapping)):
                out = segment(None, positions, hidden, residual)
            _stash(plan, index, out)
        if in_batch is None:
            return out
        output = out.new_zeros(num_tokens, out.shape[1])
        return output.index_copy_(0, in_batch, out)

    def run_layers(
        self,
        begin: int,
        end: int,
        states: torch.Tensor,
        positions: torch.Tensor,
        attn_metadata: dict[str, Any],
        slot_mapping: dict[str, torch.Tensor],
        tap: SegmentTap | None,
    ) -> torch.Tensor:
        """Layers [begin, end), both at cuts, over rows of their own.

        Args:
            states: (N, hidden) summed hidden states and residual; (N,) token ids if `begin` is 0.
            positions: (N,) int64. slot_mapping: (N,) int64 by layer name.
            tap: of every layer.

        Returns:
            (N, hidden) sum of hidden states and residual; normed states after the last layer.
        """
        # Where a layer is its segment's last makes no difference to such a tap.
        self.taps.current = None if tap is None else [tap] * len(self.segments)
        embedded = begin > 0
        out: Any = (states, torch.zeros_like(states)) if embedded else (None, None)
        context = replace(_without_graphs(slot_mapping), attn_metadata=attn_metadata)
        with override_forward_context(context):
            while begin < end:
                begin, piece = self.pieces[begin]
                out = piece(None if embedded else states, positions, *out)
                embedded = True
        self.taps.current = None
        return out if isinstance(out, torch.Tensor) else out[0] + out[1]

    def _run_selected(self, output: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Runs the selected tokens of prompts that are in; their last rows go into `output`."""
        for make in plan.selected:
            now = make()
            self.taps.current = now.taps
            assert plan.stash is not None
            hidden = plan.stash.index_select(0, now.stash_rows)
            # The stash holds the sum already; the compiled segment wants both terms.
            out: Any = (hidden, torch.zeros_like(hidden))
            context = replace(_without_graphs(now.slot_mapping), attn_metadata=now.attn_metadata)
            with override_forward_context(context):
                for segment in self.segments[now.first_segment :]:
                    out = segment(None, now.positions, *out)
            output.index_copy_(0, now.in_batch, out.index_select(0, now.last_rows))
        return output


def _stash(plan: StepPlan, segment: int, out: Any) -> None:
    write = plan.writes[segment] if plan.writes else None
    if write is not None:
        assert plan.stash is not None
        hidden, residual = (part.index_select(0, write.rows) for part in out)
        plan.stash.index_copy_(0, write.targets, hidden + residual)


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
