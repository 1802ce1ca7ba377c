"""A layer that is split, in one step: see ``worker/split_layers``.

Rows that do not go on leave before it, and their entries in it are projected. Its keys are scored
there, too, by the queries of the prompts' windows; what the scores drop goes once the rows that
run the layer have attended to all. These are of two kinds. Rows that stay by position run it in the
batch: those at both ends of a prompt are two sequences for attention. Chosen tokens run it in their
own pass, where attention takes them at any position (``ops/prompt/chosen_rows``).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_kvx.models.passes import AttnMetadata, Queries, RequestRows, ToEntries
from vllm_kvx.ops.prompt.chosen_rows import ChosenRows
from vllm_kvx.worker.batch import PassBatch, to_device
from vllm_kvx.worker.layer_hooks import LayerHooks
from vllm_kvx.worker.prefill.chunks import ChunkPlan, PromptChunk
from vllm_kvx.worker.prefill.score_and_move import PassWork, PrefillBuffers
from vllm_kvx.worker.prefill.step_batch import StepBatch
from vllm_kvx.worker.rows import DeviceRows, ranges


class SplitLayer:
    """A split layer in one step: what projects its entries, and the rows that run it.

    name: of vLLM's attention layer.
    """

    def __init__(
        self, hooks: LayerHooks, memory: PrefillBuffers, step: StepBatch, layer: int
    ) -> None:
        hook = hooks.by_number[layer]
        self._hooks, self._memory, self._step, self._number = hooks, memory, step, layer
        self._stage, self._group, self._retrieves = hook.stage, hook.group, hook.retrieves
        self.name: str = hook.layer.layer_name

    # In the pass below it, which the rows leave.

    def entries(
        self, chunks: Sequence[PromptChunk], projected: np.ndarray, starts: np.ndarray
    ) -> tuple[list[ToEntries], PassWork | None, PassWork | None]:
        """What projects the entries, and the works that score them where tokens are chosen, and
        where rows stay by position.

        Args:
            projected: (P,) requests of which rows leave. starts: (R,) first rows in the pass.
        """
        here = set(projected.tolist())
        mine = [chunk for chunk in chunks if chunk.batch_index in here]
        selecting = [chunk for chunk in mine if chunk.state.is_split]
        others = [chunk for chunk in mine if not chunk.state.is_split]
        chooses = np.isin(projected, [chunk.batch_index for chunk in selecting])
        sinks: list[ToEntries] = []
        works: list[PassWork | None] = []
        for requests, of_them in ((projected[chooses], selecting), (projected[~chooses], others)):
            queries, work = self._queries(of_them, starts)
            works.append(work)
            if len(requests):
                sinks.append(self._entries(requests, starts, queries))
        return sinks, works[0], works[1]

    def _entries(
        self, requests: np.ndarray, starts: np.ndarray, queries: Queries | None
    ) -> ToEntries:
        step, layer, device = self._step, self._number, self._memory.device
        # They run every row below.
        counts, batch_starts = step.counts[requests], step.row_ends - step.counts
        rows = to_device(ranges(starts[requests], counts), device)
        in_batch = to_device(ranges(batch_starts[requests], counts), device)
        return ToEntries(
            layer,
            layer + 1,
            rows,
            step.positions.index_select(0, in_batch),
            RequestRows(requests, counts),
            {self.name: step.slots[self._group].index_select(0, in_batch)},
            queries,
        )

    def _queries(
        self, chunks: Sequence[PromptChunk], starts: np.ndarray
    ) -> tuple[Queries | None, PassWork | None]:
        """The queries that score the layer's keys, and what is done with them."""
        plan, count = ChunkPlan(), 0
        rows: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        requests: list[int] = []
        for chunk in chunks:
            first, begin = chunk.first_query, chunk.begin
            if first == chunk.end:
                continue
            at = np.arange(first, chunk.end)
            # As if the whole chunk were there, of which the queries are the last rows.
            plan.add(chunk, count - (first - begin), self._number + 1)
            rows.append(at - begin + starts[chunk.batch_index])
            positions.append(at)
            requests.append(chunk.batch_index)
            count += len(at)
        work = plan.work(self._step.block_tables, self._memory, waits=True)
        if work is None:
            return None, None
        device, hooks = self._memory.device, self._hooks
        rows_at, at_positions = (
            to_device(np.concatenate(parts), device) for parts in (rows, positions)
        )
        of_requests = RequestRows(np.array(requests), np.array([len(at) for at in positions]))
        return Queries(rows_at, at_positions, of_requests, hooks.run_work, hooks.during(work)), work

    # In the pass that begins with it, over rows of the batch.

    def slots(self, rows: DeviceRows) -> Tensor:
        """(N,) int64 slots of the pass's rows, none of those whose entries are projected."""
        slots, plan = rows.batch.slot_mappings[self._group], rows.plan
        starts = np.cumsum(plan.counts) - plan.counts
        written = ranges(starts[plan.projected], plan.counts[plan.projected])
        if not len(written):
            return slots
        return slots.index_fill(0, to_device(written, self._memory.device), PAD_SLOT_ID)

    def metadata_later(self, rows: DeviceRows) -> Callable[[], AttnMetadata]:
        """Builds the pass's attention metadata, by layer name.

        Not before its turn: a builder may keep one batch, and the pass below runs its own.
        """

        def build() -> AttnMetadata:
            batch, ends, is_known = self._pieces(rows)
            step = self._step
            own = step.metadata_of(batch, ends, [self._group], False, is_known)
            return {**step.metadata, **own}

        return build

    def _pieces(self, rows: DeviceRows) -> tuple[PassBatch, np.ndarray, np.ndarray | None]:
        """The pass's rows as attention takes them, and (P,) int32 entries that each piece sees.

        Of pieces that the third, (P,) bool, leaves out drafted tokens may count that were rejected;
        None leaves out all.
        """
        step, plan, cut = self._step, rows.plan, rows.batch
        busy = cut.requests
        stored, begins = step.stored_lens[self._stage][busy], step.begins[busy]
        is_cut: np.ndarray | None = None
        if step.retrieval is not None and self._retrieves:
            # Retrieval overwrites what attention makes of these.
            cut_to = step.retrieval.whole[self._stage][busy]
            is_cut = cut_to > 0
            stored = np.where(is_cut, cut_to, stored)
        heads = np.where(np.isin(busy, plan.projected), plan.heads[busy], 0)
        counts = np.stack([heads, plan.counts[busy] - heads], axis=1).ravel()
        ends = np.stack([begins + heads, stored], axis=1).ravel()
        there = counts > 0
        place = np.repeat(np.arange(len(busy)), 2)[there]
        tables = list(cut.block_tables)
        if len(place) > len(busy):
            table = tables[self._group]
            tables[self._group] = table.index_select(0, to_device(place, table.device))
        batch = PassBatch(
            busy[place],
            counts[there].astype(np.int32),
            cut.positions,
            tuple(tables),
            cut.slot_mappings,
        )
        return batch, ends[there].astype(np.int32), None if is_cut is None else is_cut[place]

    # In a pass over chosen tokens.

    def chosen(
        self, places: np.ndarray, counts: np.ndarray, positions: Tensor
    ) -> tuple[ChosenRows, Tensor]:
        """Attention's metadata for rows of prompts at `places` of the batch, and their slots."""
        table = self._step.block_tables[self._group]
        tables = table.index_select(0, to_device(places, table.device))
        slots = torch.full_like(positions, PAD_SLOT_ID)
        return ChosenRows(places, counts, positions, tables), slots
