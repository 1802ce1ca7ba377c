"""The passes of a step: the direct ones over the batch's rows, and those over chosen tokens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_kvx.models.passes import (
    AttnMetadata,
    BatchRows,
    Pass,
    Previous,
    Sink,
    Source,
    Stashed,
    ToEntries,
    TokenIds,
    ToOutput,
    ToStash,
)
from vllm_kvx.policy.storage import STASH_PAGE
from vllm_kvx.worker.batch import PassBatch, to_device
from vllm_kvx.worker.decode.step import RetrievalPass
from vllm_kvx.worker.layer_hooks import LayerHooks
from vllm_kvx.worker.prefill.chunks import ChunkPlan, Piece, PromptChunk, pack_selected
from vllm_kvx.worker.prefill.jobs import PassPrompt, WindowRows
from vllm_kvx.worker.prefill.score_and_move import PassWork, PromptMemory
from vllm_kvx.worker.prefill.stash import Stash
from vllm_kvx.worker.rows import DeviceRows, ProjectedRows, ranges

_Beside = AbstractContextManager[None]
# Builds attention metadata of the groups from a KV stage on, for stored lengths (P,) of a batch.
MetadataOf = Callable[[PassBatch, np.ndarray, int], AttnMetadata]


@dataclass(frozen=True)
class StepBatch:
    """What passes need to know of the step's batch.

    Attributes:
        requests: (R,) int64 request-state indices. row_ends: (R,) end of each request's rows.
        counts: (R,) tokens of each.
        positions: (T,) int64. block_tables: (R, B) int32 by KV group. slots: (G, T) int64.
        metadata_of: builds attention metadata of a pass.
        projected: rows whose entries are projected into layers above; None if there are none.
    """

    requests: np.ndarray
    row_ends: np.ndarray
    counts: np.ndarray
    positions: Tensor
    block_tables: Sequence[Tensor]
    slots: Tensor
    metadata_of: MetadataOf
    projected: ProjectedRows | None = None


class PassMaker:
    """Makes the passes of steps; what stays the same from step to step.

    hooks, memory, stash: of the model.
    row_cuts: layers where rows leave the batch. stages: first layer of every KV stage.
    group_stages, block_sizes: by KV group. max_tokens: rows of one pass at most.
    """

    def __init__(
        self,
        hooks: LayerHooks,
        memory: PromptMemory,
        stash: Stash | None,
        row_cuts: Sequence[int],
        stages: Sequence[int],
        group_stages: Sequence[int],
        block_sizes: Sequence[int],
        max_tokens: int,
    ) -> None:
        self.hooks, self.memory, self.stash = hooks, memory, stash
        self.num_layers = len(hooks.layers)
        self.segments = tuple(pairwise((0, *row_cuts, self.num_layers)))
        self.stages, self.group_stages, self.block_sizes = stages, group_stages, block_sizes
        self.max_tokens, self.device = max_tokens, memory.device

    # What layers do besides.

    def work(
        self, chunks: Sequence[PromptChunk], step: StepBatch, counts: np.ndarray
    ) -> PassWork | None:
        """Beside the stock decoder, which runs all rows of the batch in every layer."""
        plan = self._plan(chunks, counts, 0, self.num_layers)
        return self.work_of(plan, step.block_tables)

    def work_of(self, plan: ChunkPlan, block_tables: Sequence[Tensor]) -> PassWork | None:
        windows = None
        if plan.window_rows:
            rows, slots, places = (
                to_device(np.concatenate(parts), self.device)
                for parts in (plan.window_rows, plan.window_slots, plan.window_places)
            )
            windows = WindowRows(rows, slots, places, plan.windows_by_policy)
        return PassWork.of(plan.prompts, windows, block_tables, self.memory)

    def _plan(
        self, chunks: Sequence[PromptChunk], counts: np.ndarray, first: int, last: int
    ) -> ChunkPlan:
        """The chunks that run layers [first, last) whole; counts: (R,) rows of each request."""
        plan, starts = ChunkPlan(), np.cumsum(counts) - counts
        stage = sum(start <= first for start in self.stages) - 1
        for chunk in chunks:
            state = chunk.state
            if not state.is_online and state.storages[stage].prefill.size == 0:
                plan.add(chunk, int(starts[chunk.batch_index]), last)
        return plan

    # Passes.

    def direct(
        self,
        step: StepBatch,
        chunks: Sequence[PromptChunk],
        rows: Sequence[DeviceRows | None],
        counts: Sequence[np.ndarray],
        retrieval: RetrievalPass | None,
    ) -> list[tuple[Pass, PassWork | None]]:
        """Over the rows of the batch, segment by segment, each with its work.

        Args:
            rows: that a segment runs, None for all. counts: (R,) of them by request.
        """
        passes: list[tuple[Pass, PassWork | None]] = []
        for (first, last), here, ran in zip(self.segments, rows, counts, strict=True):
            if here is not None and here.num_rows == 0:
                break
            source: Source = Previous(None if here is None else here.from_previous)
            if first == 0:
                source = BatchRows(None if here is None else here.in_batch)
            plan = self._plan(chunks, ran, first, last)
            work = self.work_of(plan, step.block_tables)
            sinks: list[Sink] = []
            if plan.stash_rows:
                sinks.append(self._to_stash(plan))
            starts, slots = np.cumsum(ran) - ran, None
            if step.projected is not None:
                sinks += self._to_entries(step, step.projected, starts, last)
                unwritten = step.projected.unwritten(first, starts)
                if len(unwritten):
                    slots = step.slots if here is None else here.batch.slot_mappings
                    slots = slots.index_fill(1, to_device(unwritten, self.device), PAD_SLOT_ID)
            if last == self.num_layers:
                sinks.append(ToOutput(None if here is None else here.in_batch))
            now = Pass(first, last, source, sinks, beside=self.hooks.beside(work, retrieval))
            if here is not None:
                now.positions = here.batch.positions
                slots = here.batch.slot_mappings if slots is None else slots
            if slots is not None:
                now.slot_mapping = self.slots(slots, first, last)
            passes.append((now, work))
        return passes

    def slots(self, slots: Tensor, first: int, last: int) -> dict[str, Tensor]:
        """By layer name, of layers [first, last); slots: (G, N)."""
        return {
            hook.layer.layer_name: slots[hook.group] for hook in self.hooks.layers[first:last]
        }

    def _to_stash(self, plan: ChunkPlan) -> ToStash:
        assert self.stash is not None
        targets = [
            self.stash.rows(chunk.state.req_id, chunk.begin, chunk.end)
            for chunk in plan.stash_chunks
        ]
        return ToStash(
            self.stash.states,
            to_device(np.concatenate(targets), self.device),
            to_device(np.concatenate(plan.stash_rows), self.device),
        )

    def _to_entries(
        self, step: StepBatch, projected: ProjectedRows, starts: np.ndarray, layer: int
    ) -> list[Sink]:
        """What a pass that ends below `layer` projects; starts: (R,) first rows in the pass."""
        here = projected.at(layer)
        if not len(here):
            return []
        # They run every row below.
        counts, batch_starts = projected.counts[here], step.row_ends - step.counts
        rows = to_device(ranges(starts[here], counts), self.device)
        in_batch = to_device(ranges(batch_starts[here], counts), self.device)
        slots = step.slots.index_select(1, in_batch)
        positions = step.positions.index_select(0, in_batch)
        by_name = self.slots(slots, layer, self.num_layers)
        return [ToEntries(layer, self.num_layers, rows, positions, by_name)]

    def resumed(
        self,
        step: StepBatch,
        chunks: Sequence[PromptChunk],
        direct: Sequence[tuple[Pass, PassWork | None]],
    ) -> list[Callable[[], Pass]]:
        """Over the tokens chosen of prompts that are in; each to be made when its turn comes."""
        by_choice: dict[tuple[int, int], list[PromptChunk]] = {}
        for chunk in chunks:
            selection = chunk.state.selection
            if chunk.is_last and selection is not None and selection.online is None:
                where = selection.after, selection.resumes_at
                by_choice.setdefault(where, []).append(chunk)
        passes = []
        for (after, resumes_at), done in sorted(by_choice.items(), key=lambda item: item[0]):
            work = next(work for now, work in direct if now.first <= after < now.last)
            assert work is not None
            for pieces in pack_selected(done, self.max_tokens):
                passes.append(self._resumed(pieces, resumes_at, work, step))
        return passes

    def _resumed(
        self, pieces: Sequence[Piece], first: int, chosen_in: PassWork, step: StepBatch
    ) -> Callable[[], Pass]:
        places = np.array([piece.chunk.batch_index for piece in pieces])
        counts = np.array([piece.end - piece.begin for piece in pieces], dtype=np.int32)
        ends = np.array([piece.end for piece in pieces], dtype=np.int32)
        stage = sum(start <= first for start in self.stages) - 1
        # Pages are read here: by the time the pass runs they may have another owner on the host.
        pages = []
        if first:
            assert self.stash is not None
            pages = [self.stash.pages(piece.chunk.state.req_id) for piece in pieces]

        def make() -> Pass:
            chosen = [
                chosen_in.chosen[piece.chunk.state.req_id][piece.begin : piece.end]
                for piece in pieces
            ]
            positions = torch.cat(chosen).long() if len(chosen) > 1 else chosen[0].long()
            source: Source
            if first:
                assert self.stash is not None
                rows = self.stash_rows(pages, counts, positions)
                source = Stashed(self.stash.states, rows)
            else:
                source = TokenIds(self._ids(step.requests[places], counts, positions))
            batch = self.batch(places, counts, ends, positions, stage, step.block_tables)
            done = [i for i, piece in enumerate(pieces) if piece.is_last]
            row_ends = np.cumsum(counts)
            prompts = [
                pieces[i].chunk.state.in_resumed_pass(int(places[i]), int(row_ends[i]))
                for i in done
            ]
            sinks = []
            if done:
                in_batch = to_device(step.row_ends[places[done]] - 1, self.device)
                sinks.append(ToOutput(in_batch, to_device(row_ends[done] - 1, self.device)))
            return Pass(
                first,
                self.num_layers,
                source,
                sinks,
                positions,
                step.metadata_of(batch, ends, stage),
                self.slots(batch.slot_mappings, first, self.num_layers),
                self.beside(prompts, step.block_tables),
            )

        return make

    def beside(self, prompts: Sequence[PassPrompt], block_tables: Sequence[Tensor]) -> _Beside:
        """The hooks' context for these prompts."""
        return self.hooks.beside(PassWork.of(prompts, None, block_tables, self.memory))

    def _ids(self, requests: np.ndarray, counts: np.ndarray, positions: Tensor) -> Tensor:
        """(N,) int32 token ids at `positions` of requests, `counts` of each."""
        assert self.memory.token_ids is not None
        row = to_device(np.repeat(requests, counts), self.device)
        return self.memory.token_ids[row, positions]

    def stash_rows(self, pages: Sequence[np.ndarray], counts: np.ndarray, at: Tensor) -> Tensor:
        """(N,) int64 rows of the stash for positions `at` (N,), `counts` of each prompt's pages."""
        page_starts = np.cumsum([0, *map(len, pages[:-1])])
        page = to_device(np.repeat(page_starts, counts), self.device) + at // STASH_PAGE
        rows = to_device(np.concatenate(pages), self.device).index_select(0, page)
        return rows * STASH_PAGE + at % STASH_PAGE

    def batch(
        self,
        places: np.ndarray,
        counts: np.ndarray,
        ends: np.ndarray,
        positions: Tensor,
        stage: int,
        block_tables: Sequence[Tensor],
    ) -> PassBatch:
        """A pass whose rows are entries [end - count, end) of each prompt, from a KV stage on."""
        here = to_device(places, self.device)
        tables = tuple(
            table.index_select(0, here) if self.group_stages[group] >= stage else table
            for group, table in enumerate(block_tables)
        )
        piece_of = to_device(np.repeat(np.arange(len(counts)), counts), self.device)
        entries = [np.arange(e - n, e) for n, e in zip(counts, ends, strict=True)]
        entry = to_device(np.concatenate(entries), self.device)
        slots = torch.empty(len(tables), len(entry), dtype=torch.int64, device=self.device)
        for group, size in enumerate(self.block_sizes):
            if self.group_stages[group] >= stage:
                block = tables[group][piece_of, entry // size].long()
                slots[group] = block * size + entry % size
        return PassBatch(places, counts, positions, tables, slots)


def run_in_turn(
    direct: Sequence[tuple[Pass, PassWork | None]],
    resumed: Sequence[Callable[[], Pass]],
    online: Iterator[Pass],
) -> Iterator[Pass]:
    """All passes of a step, in order."""
    for now, _ in direct:
        yield now
    for make in resumed:
        yield make()
    yield from online


def lens_to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """(P,) int32 on the device, without waiting for it."""
    return async_tensor_h2d(values, device=device)
