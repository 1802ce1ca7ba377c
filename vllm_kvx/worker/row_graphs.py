"""CUDA graphs of passes of one row for each request, which drafting replays after a step's own.

As the graphs of decode steps they have all of a pass in them, for some numbers of rows, and read
their input at fixed addresses. A pass with fewer rows is padded: rows that are nobody's see no
entry, and store none. Attention's metadata is built anew before each replay, into what a graph of
the same number of rows was captured with, by the same builders as a step's. Passes by which the
model drafts for itself follow one another without the host (``DraftGraphs``).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from vllm_kvx.config.settings import KVSettings
from vllm_kvx.models.passes import AttnMetadata, StepPlan
from vllm_kvx.worker.draft_rows import DraftRows, RowPass, slots_of
from vllm_kvx.worker.row_graph_work import GraphReads, GraphWork, KeptQueries

logger = init_logger("vllm.kvx.worker")

# Passes of more rows run without graphs. Their launches take no longer, and their rows do.
MOST_ROWS = 64


class RowBuffers:
    """What graphs of passes read, at fixed addresses.

    inputs: token ids, positions, lengths and the rows that are nobody's.
    tables: (rows, B) int32 by KV group. slots: (KV groups, rows) int64.
    """

    def __init__(self, num_rows: int, widths: Sequence[int], device: torch.device) -> None:
        """widths: B by KV group."""
        self.inputs = InputBuffers(num_rows, num_rows, device)
        self.tables = tuple(
            torch.zeros(num_rows, width, dtype=torch.int32, device=device) for width in widths
        )
        shape = len(widths), num_rows
        self.slots = torch.full(shape, PAD_SLOT_ID, dtype=torch.int64, device=device)
        self._count = torch.arange(num_rows + 1, dtype=torch.int32, device=device)

    def set(self, ids: Tensor, now: RowPass, size: int) -> None:
        """Writes a pass of P rows, and pads it to `size`. ids: (P,) its tokens."""
        rows, inputs = now.num_rows, self.inputs
        inputs.input_ids[:rows].copy_(ids)
        inputs.positions[:rows].copy_(now.batch.positions)
        inputs.seq_lens[:rows].copy_(now.lens)
        inputs.seq_lens[rows:size].zero_()
        # As vLLM pads: rows that are nobody's are of requests without a token.
        starts = inputs.query_start_loc[: size + 1]
        torch.clamp(self._count[: size + 1], max=rows, out=starts)
        torch.ge(self._count[:size], rows, out=inputs.is_padding[:size])
        self.slots[:, :rows].copy_(now.batch.slot_mappings)
        self.slots[:, rows:size].fill_(PAD_SLOT_ID)
        for mine, table in zip(self.tables, now.batch.block_tables, strict=True):
            mine[:rows].copy_(table)

    def advance(self, ids: Tensor, limit: int, block_sizes: Sequence[int]) -> None:
        """Within a graph: from what a pass has read to what the next one reads.

        Args:
            ids: (size,) int32 tokens of the next pass. limit: tokens of the longest context, behind
                which there is no slot. block_sizes: tokens of a block, by KV group.
        """
        size, inputs = len(ids), self.inputs
        positions, is_padding = inputs.positions[:size], inputs.is_padding[:size]
        inputs.input_ids[:size].copy_(ids)
        positions.add_(1).clamp_(max=limit - 1)
        inputs.seq_lens[:size].copy_((positions + 1).masked_fill(is_padding, 0))
        tables, slots = self.first(size)
        slots.copy_(slots_of(positions, tables, block_sizes).masked_fill(is_padding, PAD_SLOT_ID))

    def first(self, size: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Block tables and slots of the first rows."""
        return tuple(table[:size] for table in self.tables), self.slots[:, :size]


class RowGraphs:
    """The graphs of one kind of pass.

    They have a memory pool of their own: states of a step's own pass lie in vLLM's where it
    replayed graphs of the decoder's pieces, and are needed after the passes that draft.

    sizes: ascending numbers of rows.
    """

    def __init__(self, runner: Any, work: GraphWork, sizes: Sequence[int]) -> None:
        """runner: vLLM's GPUModelRunner, whose KV cache is there."""
        self._runner, self._work, self.sizes = runner, work, tuple(sizes)
        self._state = runner.model_state
        widths = [table.shape[1] for table in runner.block_tables.input_block_tables]
        self._buffers = RowBuffers(self.sizes[-1], widths, runner.device)
        self._batches: dict[int, InputBatch] = {}
        self._hidden: Tensor | None = None
        # By number of rows, attention's of the graph, into which it is planned anew.
        self._metadata: dict[int, AttnMetadata] = {}
        self.manager = CudaGraphManager(
            runner.vllm_config, runner.device, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=1
        )
        self.manager.pool = current_platform.graph_pool_handle()
        descriptions = [_description(size) for size in reversed(self.sizes)]
        self.manager._capture_descs = {CUDAGraphMode.FULL: descriptions}

    def capture(self, most: int | None = None) -> None:
        """Captures the graphs, or the `most` largest of them."""
        self.manager._max_full_descs_to_capture = most
        self.manager.capture(self._forward, "Capturing CUDA graphs of drafts")

    def forget_cache(self) -> None:
        """Lets go of the KV cache, which vLLM is about to free."""
        if self._state.retrieval is not None:
            self._state.retrieval.sidecars.release()

    def run(self, ids: Tensor, now: RowPass) -> Tensor | None:
        """(P, H) final states of tokens (P,); None if no graph does what `now` has to do.

        They hold until the next pass runs.
        """
        size = self._set(ids, now)
        if size is None:
            return None
        self._replay(now, size)
        assert self._hidden is not None
        return self._hidden[: now.num_rows]

    def _set(self, ids: Tensor, now: RowPass) -> int | None:
        """Writes what a graph reads. Its number of rows, or None if none does what `now` has to."""
        size = size_of(now.num_rows, self.sizes)
        if size is None or size not in self._batches:
            return None
        plan = self._work.plan(now, size)
        if plan is None:
            return None
        self._buffers.set(ids, now, size)
        self._work.set(plan, size)
        return size

    def _replay(self, now: RowPass, size: int) -> None:
        self._metadata[size] = self._attention(self._batch(now, size), size)
        self.manager.run_fullgraph(_description(size))

    def _batch(self, now: RowPass, size: int) -> InputBatch:
        """The pass with its padding, as vLLM pads a step that replays a graph."""
        rows, bounds = now.num_rows, np.zeros(size, dtype=np.int32)
        bounds[:rows] = now.bounds
        return replace(
            self._batches[size],
            num_reqs=rows,
            num_tokens=rows,
            num_scheduled_tokens=np.ones(rows, dtype=np.int32),
            query_start_loc_np=np.minimum(np.arange(size + 1, dtype=np.int32), rows),
            seq_lens_cpu_upper_bound=torch.from_numpy(bounds),
            is_prefilling_np=np.zeros(size, dtype=bool),
        )

    def _attention(self, batch: InputBatch, size: int, for_capture: bool = False) -> AttnMetadata:
        metadata: AttnMetadata = self._state.shared.build(
            batch,
            CUDAGraphMode.FULL,
            *self._buffers.first(size),
            self._runner.attn_groups,
            self._runner.kv_cache_config,
            for_capture,
        )
        return metadata

    def _forward(
        self, desc: BatchExecutionDescriptor, warmup: bool
    ) -> Callable[[CUDAGraphMode], None]:
        """What a graph has in it; see ``CreateForwardFn``."""
        size, inputs, runner = desc.num_tokens, self._buffers.inputs, self._runner
        batch = InputBatch.make_dummy(size, size, inputs, max_query_len=1)
        tables, slots = self._buffers.first(size)
        slots.fill_(PAD_SLOT_ID)
        self._work.set(None, size)
        self._metadata[size] = self._attention(batch, size, for_capture=True)
        self._batches[size] = batch
        by_layer = build_slot_mappings_by_layer(slots, runner.kv_cache_config)

        def forward(mode: CUDAGraphMode) -> None:
            self._before(size)
            hooks = self._state.hooks.during(*self._work.beside(size, tables))
            self._state.hooked.begin_step(StepPlan(hooks=hooks))
            with set_forward_context(
                self._metadata[size],
                runner.vllm_config,
                num_tokens=size,
                cudagraph_runtime_mode=mode,
                slot_mapping=by_layer,
                is_padding=inputs.is_padding[:size],
            ):
                hidden = runner.model(
                    input_ids=inputs.input_ids[:size],
                    positions=inputs.positions[:size],
                    inputs_embeds=None,
                    intermediate_tensors=None,
                )
            self._after(hidden)

        return forward

    def _before(self, size: int) -> None:
        """What a graph of so many rows does before the decoder."""

    def _after(self, hidden: Tensor) -> None:
        """What a graph does with the decoder's final states, (size, H)."""
        if self._hidden is None:  # Of the most rows, before anything is captured.
            self._hidden = torch.empty_like(hidden)
        self._hidden[: len(hidden)].copy_(hidden)


class DraftGraphs(RowGraphs):
    """Graphs of the passes by which the model drafts for itself.

    A graph has in it what comes after the decoder, too: the likeliest tokens, and the input of the
    next pass, which is the same graph. So the host writes what a step's first pass reads, and
    replays. It need not plan attention again where the backend does so within a graph.
    """

    def __init__(
        self, runner: Any, work: GraphReads, sizes: Sequence[int], num_drafts: int
    ) -> None:
        """num_drafts: the most tokens that a step drafts for a request."""
        super().__init__(runner, work, sizes)
        self._reads = work
        self._groups = [group for each in runner.attn_groups for group in each]
        self._plans = all(each.supports_draft_decode_metadata_update for each in self._groups)
        shape = self.sizes[-1], num_drafts
        self._drafts = torch.zeros(shape, dtype=torch.int32, device=runner.device)

    def draft(self, ids: Tensor, rows: DraftRows) -> Tensor | None:
        """(P, K) int32 tokens after `ids`, (P,); None if no graph does what the passes have to do.

        They hold until tokens are drafted again.
        """
        first = rows.whole
        size = self._set(ids, first)
        if size is None:
            return None
        for number in range(rows.count):
            self._replay(first, size)
            self._drafts[:size, number].copy_(self._buffers.inputs.input_ids[:size])
        return self._drafts[: first.num_rows, : rows.count]

    def _replay(self, now: RowPass, size: int) -> None:
        if self._plans:
            self.manager.run_fullgraph(_description(size))
        else:
            super()._replay(now, size)

    def _before(self, size: int) -> None:
        inputs = self._buffers.inputs
        self._reads.see(inputs.seq_lens[:size], inputs.is_padding[:size])
        if self._plans:
            for group in self._groups:
                group.update_draft_decode_metadata(self._metadata[size])

    def _after(self, hidden: Tensor) -> None:
        ids = self._runner.model.compute_logits(hidden).argmax(-1).int()
        self._buffers.advance(ids, self._runner.max_model_len, self._state.block_tables.block_sizes)


def capture_row_graphs(runner: Any, settings: KVSettings) -> None:
    """Makes vLLM capture graphs of the passes that draft, after its own and beside their memory.

    Without FULL graphs of decode steps there are none of these either: ``cudagraph_mode`` says so,
    or the attention backend.
    """
    stock: Callable[..., Any] = runner.initialize_kv_cache

    def initialize_kv_cache(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        manager = runner.cudagraph_manager
        if manager is not None and manager.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            _capture_beside(manager, lambda: graphs_of(runner, settings))
        return result

    runner.initialize_kv_cache = initialize_kv_cache


def graphs_of(runner: Any, settings: KVSettings) -> list[RowGraphs]:
    """Of each kind of pass that the server runs, its graphs, which are still to be captured."""
    state, graphs = runner.model_state, list[RowGraphs]()
    captured = runner.compilation_config.cudagraph_capture_sizes or ()
    if settings.layout.lookahead and len(state.memory.queries):
        kept = KeptQueries(state.memory)
        if sizes := sizes_of(captured, kept.most_rows):
            graphs.append(RowGraphs(runner, kept, sizes))
    if settings.drafts is not None:
        most, count = min(MOST_ROWS, runner.max_num_reqs), runner.num_speculative_steps
        if sizes := sizes_of(captured, most):
            reads = GraphReads(state.retrieval, most, count, runner.device)
            graphs.append(DraftGraphs(runner, reads, sizes, count))
    return graphs


def row_graphs_of(runner: Any) -> Sequence[RowGraphs]:
    """The graphs that are captured; none on a server without."""
    graphs: Sequence[RowGraphs] = getattr(runner.cudagraph_manager, "kvx_row_graphs", ())
    return graphs


def sizes_of(captured: Sequence[int], most_rows: int) -> list[int]:
    """Ascending numbers of rows that graphs are captured for: vLLM's own of `most_rows` or less."""
    return sorted({size for size in captured if 0 < size <= most_rows})


def size_of(num_rows: int, sizes: Sequence[int]) -> int | None:
    """The least of the ascending sizes that has room for so many rows; None if none has."""
    return next((size for size in sizes if size >= num_rows), None)


def _description(size: int) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(CUDAGraphMode.FULL, size, size, uniform_token_count=1)


def _capture_beside(manager: Any, graphs_of_server: Callable[[], list[RowGraphs]]) -> None:
    """manager: vLLM's, of one KV cache. What is captured goes with it."""
    stock: Callable[..., None] = manager.capture

    def capture(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        full = manager._capture_descs.get(CUDAGraphMode.FULL)
        if not full:
            return
        graphs = graphs_of_server()
        manager.kvx_row_graphs = graphs
        if manager._max_full_descs_to_capture is None:
            for each in graphs:
                each.capture()
            if graphs:
                sizes = [size for each in graphs for size in each.sizes]
                logger.info(
                    "Captured %d CUDA graphs of passes that draft tokens, of up to %d rows.",
                    len(sizes),
                    max(sizes),
                )
            return
        # vLLM will throw this manager away: it measures a few graphs before it sizes the KV cache,
        # and reserves memory for as many as are described here.
        for each in graphs:
            each.capture(most=1)
            each.forget_cache()
        more = sum(len(each.sizes) - 1 for each in graphs)
        descriptions = manager._capture_descs
        manager._capture_descs = {
            **descriptions,
            CUDAGraphMode.FULL: [*full, *full[:1] * more],
        }

    manager.capture = capture
