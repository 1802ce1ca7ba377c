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
    RequestRows,
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
from vllm_kvx.worker.prefill.chunks import ChunkPlan, PromptChunk
from vllm_kvx.worker.prefill.packing import Piece, pack_selected
from vllm_kvx.worker.prefill.score_and_move import PassWork, PrefillBuffers
from vllm_kvx.worker.prefill.scoring import PassPrompt, WindowRows
from vllm_kvx.worker.prefill.sliding_passes import PassesOfWindows
from vllm_kvx.worker.prefill.split_layer import SplitLayer
from vllm_kvx.worker.prefill.stash import Stash
from vllm_kvx.worker.prefill.step_batch import StepBatch
from vllm_kvx.worker.rows import DeviceRows, ProjectedRows, ranges
from vllm_kvx.worker.split_layers import Cuts

_Beside = AbstractContextManager[None]


@dataclass
class Direct:
    """A pass over rows of the batch.

    work: beside its layers. chosen: what chooses tokens in the layer above it, if that is split.
    metadata: builds the pass's own, where its first layer is split, when its turn comes.
    """

    now: Pass
    work: PassWork | None
    chosen: PassWork | None = None
    metadata: Callable[[], AttnMetadata] | None = None


class PassMaker:
    """Makes the passes of steps; what stays the same from step to step.

    hooks, memory, stash: of the model.
    cuts: layers where rows leave the batch. stages: first layer of every KV stage.
    group_stages, block_sizes: by KV group. max_tokens: rows of one pass at most.
    """

    def __init__(
        self,
        hooks: LayerHooks,
        memory: PrefillBuffers,
        stash: Stash | None,
        cuts: Cuts,
        stages: Sequence[int],
        group_stages: Sequence[int],
        block_sizes: Sequence[int],
        max_tokens: int,
    ) -> None:
        self.hooks, self.memory, self.stash = hooks, memory, stash
        # Of a pipeline's rank these are numbers of the whole model, too.
        self.first_layer = cuts.firsts[0]
        self.num_layers = self.first_layer + len(hooks.names)
        self.segments = tuple(pairwise((*cuts.firsts, self.num_layers)))
        self.split_layers = cuts.split_layers
        self.stages, self.group_stages, self.block_sizes = stages, group_stages, block_sizes
        self.max_tokens, self.device = max_tokens, memory.device

    # What layers do besides.

    def work(
        self, chunks: Sequence[PromptChunk], step: StepBatch, counts: np.ndarray
    ) -> PassWork | None:
        """The work on entries beside the stock decoder, whose layers run all rows of the batch.

        counts: (R,) rows of each request. None if there is nothing to do.
        """
        plan = self._plan(chunks, counts, self.first_layer, self.num_layers)
        return plan.work(step.block_tables, self.memory)

    def _plan(
        self, chunks: Sequence[PromptChunk], counts: np.ndarray, first: int, last: int
    ) -> ChunkPlan:
        """The chunks that run layers [first, last) whole; counts: (R,) rows of each request."""
        plan, starts = ChunkPlan(), np.cumsum(counts) - counts
        for chunk in chunks:
            is_here = counts[chunk.batch_index] == chunk.end - chunk.begin
            if is_here and chunk.state.runs_whole(first):
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
    ) -> list[Direct]:
        """Over the rows of the batch, segment by segment.

        Args:
            rows: that a segment runs, None for all. counts: (R,) of them by request.
        """
        passes: list[Direct] = []
        earlier: PassWork | None = None
        above = (*rows[1:], None)
        for (first, last), here, ran, rest in zip(self.segments, rows, counts, above, strict=True):
            if here is not None and here.num_rows == 0:
                break
            source: Source = Previous(None if here is None else here.from_previous)
            if first == self.first_layer:
                source = BatchRows(None if here is None else here.in_batch)
            plan = self._plan(chunks, ran, first, last)
            work = plan.work(step.block_tables, self.memory, earlier)
            sinks: list[Sink] = []
            if plan.stash_rows:
                sinks.append(self._to_stash(plan))
            starts, slots = np.cumsum(ran) - ran, None
            chosen = earlier = None
            if rest is not None and len(rest.plan.projected):
                layer = SplitLayer(self.hooks, self.memory, step, last)
                entries, chosen, earlier = layer.entries(chunks, rest.plan.projected, starts)
                sinks += entries
            if step.projected is not None:
                sinks += self._to_entries(step, step.projected, starts, last)
                unwritten = step.projected.unwritten(first, starts)
                if len(unwritten):
                    slots = step.slots if here is None else here.batch.slot_mappings
                    slots = slots.index_fill(1, to_device(unwritten, self.device), PAD_SLOT_ID)
            if last == self.num_layers:
                sinks.append(ToOutput(None if here is None else here.in_batch))
            now = Pass(first, last, source, sinks, hooks=self.hooks.during(work, retrieval))
            if here is not None:
                now.requests = RequestRows(here.batch.requests, here.batch.counts)
                now.positions = here.batch.positions
                slots = here.batch.slot_mappings if slots is None else slots
            if slots is not None:
                now.slot_mapping = self.slots(slots, first, last)
            metadata = None
            if here is not None and first in self.split_layers:
                layer = SplitLayer(self.hooks, self.memory, step, first)
                now.slot_mapping[layer.name] = layer.slots(here)
                metadata = layer.metadata_later(here)
            passes.append(Direct(now, work, chosen, metadata))
        return passes

    def groups_of(self, stage: int) -> list[int]:
        """The KV groups of a stage."""
        return [group for group, its in enumerate(self.group_stages) if its == stage]

    def groups_from(self, stage: int) -> list[int]:
        """The KV groups from a stage on whose layers have full attention."""
        last = len(self.stages)
        return [group for group, its in enumerate(self.group_stages) if stage <= its < last]

    def slots(self, slots: Tensor, first: int, last: int) -> dict[str, Tensor]:
        """The slots (N,) of layers [first, last), by layer name; slots: (KV groups, N)."""
        return self.hooks.slots(slots, first, last)

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
        requests = RequestRows(here, counts)
        return [ToEntries(layer, self.num_layers, rows, positions, requests, by_name)]

    def resumed(
        self,
        step: StepBatch,
        chunks: Sequence[PromptChunk],
        direct: Sequence[Direct],
    ) -> list[Callable[[], Pass]]:
        """Over the tokens chosen of prompts that are in; each to be made when its turn comes."""
        by_choice: dict[tuple[int, int], list[PromptChunk]] = {}
        for chunk in chunks:
            selection = chunk.state.selection
            if chunk.is_last and selection is not None and selection.online is None:
                where = selection.after, chunk.state.resumes_at
                by_choice.setdefault(where, []).append(chunk)
        passes = []
        for (after, resumes_at), done in sorted(by_choice.items(), key=lambda item: item[0]):
            if after in self.split_layers:
                work = next(each.chosen for each in direct if each.now.last == after)
            else:
                work = next(x.work for x in direct if x.now.first <= after < x.now.last)
            assert work is not None
            packed, windows = pack_selected(done, self.max_tokens), PassesOfWindows(self.hooks)
            # Where that layer is split: its entries move once all chosen rows have seen them.
            is_split = resumes_at == after and after in self.split_layers
            for number, pieces in enumerate(packed):
                earlier = work if is_split and number == len(packed) - 1 else None
                passes.append(
                    self._resumed(pieces, resumes_at, is_split, work, earlier, step, windows)
                )
        return passes

    def _resumed(
        self,
        pieces: Sequence[Piece],
        first: int,
        is_split: bool,
        chosen_in: PassWork,
        earlier: PassWork | None,
        step: StepBatch,
        windows: PassesOfWindows,
    ) -> Callable[[], Pass]:
        """From layer `first` on, which holds all of the prompts' entries if it is split.

        earlier: the work whose moves wait for this pass. windows: of all passes over the choice.
        """
        places = np.array([piece.chunk.batch_index for piece in pieces])
        counts = np.array([piece.end - piece.begin for piece in pieces], dtype=np.int32)
        ends = np.array([piece.end for piece in pieces], dtype=np.int32)
        stage = sum(start <= first + is_split for start in self.stages) - 1
        # Pages are read here: by the time the pass runs they may have another owner on the host.
        pages, kept = [], self._windows(pieces)
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
            metadata = step.metadata_of(batch, ends, self.groups_from(stage))
            slots = self.slots(batch.slot_mappings, first + is_split, self.num_layers)
            windows.add(pieces, positions, step.block_tables, self.block_sizes, metadata, slots)
            if is_split:
                layer = SplitLayer(self.hooks, self.memory, step, first)
                metadata[layer.name], slots[layer.name] = layer.chosen(places, counts, positions)
            return Pass(
                first,
                self.num_layers,
                source,
                sinks,
                RequestRows(places, counts),
                positions,
                metadata,
                slots,
                self.hooks_for(prompts, step.block_tables, earlier, first + is_split, kept),
            )

        return make

    def hooks_for(
        self,
        prompts: Sequence[PassPrompt],
        block_tables: Sequence[Tensor],
        earlier: PassWork | None = None,
        first: int = 0,
        windows: WindowRows | None = None,
    ) -> _Beside:
        """The hooks' context for these prompts; see ``PassWork``."""
        work = PassWork.of(prompts, windows, block_tables, self.memory, earlier, first=first)
        return self.hooks.during(work)

    def _windows(self, pieces: Sequence[Piece]) -> WindowRows | None:
        """The queries of these chosen tokens that retention needs, which waits for more of them."""
        plan, row = ChunkPlan(), 0
        for piece in pieces:
            row += piece.end - piece.begin
            if piece.is_last and piece.chunk.state.then is not None:
                plan.keep_window(piece.chunk.state, row)
        return plan.windows(self.device)

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
    direct: Sequence[Direct],
    resumed: Sequence[Callable[[], Pass]],
    online: Iterator[Pass],
) -> Iterator[Pass]:
    """All passes of a step, in order."""
    for each in direct:
        if each.metadata is not None:
            each.now.attn_metadata = each.metadata()
        yield each.now
    for make in resumed:
        yield make()
    yield from online


def lens_to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """(P,) int32 on the device, without waiting for it."""
    return async_tensor_h2d(values, device=device)
