"""What a step does for the prompts in it: stash their states, score their keys, run the selected.

Planned on the host from counts alone; which tokens are selected is known on the device only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_kvx.policy.axes import OnlineRule, Positions, ScoreSpec
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import Storage, storage_of
from vllm_kvx.worker.layer_hooks import Prompt
from vllm_kvx.worker.rows import SegmentRows


@dataclass
class PromptState:
    """A request whose prompt is scored, selected from or compacted.

    Attributes:
        storages: what it stores, by segment.
        window, kernel: of the saliency; window 0 if nothing is scored.
        per_layer, decay: see ``taps.Prompt``; `decay` is of the segments up to `last_central`.
        last_central: segment whose last layer ends the centrality.
        by_block: retention keeps whole blocks, ranked by centrality.
        online: the policy, where the pivot is found while the prompt runs; see ``online``.
        first_selected: first segment that only selected tokens reach; None if all go on.
        slot: where its window's queries are kept while it is spread over chunks.
        stats_row: its policy's row in the counters.
    """

    req_id: str
    prompt_len: int
    storages: list[Storage]
    window: int
    kernel: int
    first_selected: int | None
    num_propagated: int
    sinks: int | None
    per_layer: bool = False
    decay: float | None = None
    last_central: int | None = None
    by_block: bool = False
    online: OnlineRule | None = None
    slot: int | None = None
    stats_row: int = 0

    @classmethod
    def of(
        cls,
        req_id: str,
        policy: KVPolicy,
        prompt_len: int,
        starts: Sequence[int],
        block_size: int,
        num_layers: int,
    ) -> "PromptState | None":
        """The state of a request; None if the prompt is as in any other.

        starts: first layer of every segment. block_size: entries of a KV cache block.
        """
        storages = [
            storage_of(policy, prompt_len, start, block_size, num_layers) for start in starts
        ]
        if not any(s.changes for s in storages):
            return None
        retain, selection = policy.retain, policy.selection(prompt_len, num_layers)
        online = selection.online if selection is not None else None
        first_selected, num_propagated = None, 0
        if selection is not None:
            num_propagated = selection.count
            if online is None:
                first_selected = list(starts).index(selection.after + 1)
        scorer = selection.score if selection is not None else None
        by = retain.keeps_by if retain is not None else None
        compacts = any(s.compacts for s in storages)
        if isinstance(by, ScoreSpec) and compacts:
            scorer = by
        by_block = retain is not None and retain.unit == "block" and compacts
        central = by if by_block else scorer if selection is None else selection.score
        decay, last_central = None, None
        if isinstance(central, ScoreSpec) and central.decay is not None:
            decay = central.decay
            last_central = len(starts) - 1
            after = retain.ranked_after() if by_block and retain is not None else None
            if after is None and selection is not None and online is None:
                after = selection.after
            if after is not None:
                last_central = sum(start <= after for start in starts) - 1
        return cls(
            req_id=req_id,
            prompt_len=prompt_len,
            storages=storages,
            window=min(scorer.window, prompt_len) if scorer is not None else 0,
            kernel=scorer.kernel if scorer is not None else 1,
            first_selected=first_selected,
            num_propagated=num_propagated,
            sinks=by.sinks if isinstance(by, Positions) else None,
            per_layer=isinstance(by, ScoreSpec) and by.over_heads,
            decay=decay,
            last_central=last_central,
            by_block=by_block,
            online=online,
        )

    def is_direct(self, segment: int) -> bool:
        """Whether the segment computes the whole prompt, chunk by chunk."""
        if self.online is not None:
            return False
        if self.first_selected is not None and segment >= self.first_selected:
            return False
        return self.storages[segment].prefill.size == 0


@dataclass(frozen=True)
class PromptChunk:
    """One prompt's part of a step: its place in the batch, and positions [begin, end)."""

    state: PromptState
    batch_index: int
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.state.prompt_len

    @property
    def splits_window(self) -> bool:
        """Whether a part of the window, not all of it, is in this chunk."""
        state = self.state
        window_start = state.prompt_len - state.window
        if not state.window or self.end <= window_start:
            return False
        return self.begin > window_start or not self.is_last


@dataclass
class SegmentPlan:
    """The direct pass over one segment, for these prompts.

    Attributes:
        prompts: those whose last chunk is in the step.
        window_rows, window_slots, window_places: (n,) int64 queries to keep; see ``WindowRows``.
        stash_rows: (n,) int64 rows of the segment's output whose states wait.
        stash_chunks: the chunks that they are of.
    """

    prompts: list[Prompt] = field(default_factory=list)
    window_rows: list[np.ndarray] = field(default_factory=list)
    window_slots: list[np.ndarray] = field(default_factory=list)
    window_places: list[np.ndarray] = field(default_factory=list)
    stash_rows: list[np.ndarray] = field(default_factory=list)
    stash_chunks: list[PromptChunk] = field(default_factory=list)


def plan_direct(
    chunks: Sequence[PromptChunk],
    counts: np.ndarray,
    rows: Sequence[SegmentRows | None],
) -> list[SegmentPlan]:
    """The direct pass of every segment.

    Args:
        chunks: prompts in the step.
        counts: (R,) tokens scheduled per request.
        rows: rows that each segment runs; None for all.
    """
    plans = []
    for segment, trimmed in enumerate(rows):
        plan = SegmentPlan()
        plans.append(plan)
        run = counts if trimmed is None else trimmed.counts
        starts = np.cumsum(run) - run
        for chunk in chunks:
            if chunk.state.is_direct(segment):
                plan_chunk(plan, chunk, segment, int(starts[chunk.batch_index]))
    return plans


def plan_chunk(plan: SegmentPlan, chunk: PromptChunk, segment: int, start_row: int) -> None:
    """Adds a chunk whose rows begin at `start_row` of the pass to the plan of a segment."""
    state = chunk.state
    storage = state.storages[segment]
    selects = state.first_selected == segment + 1
    if selects:
        plan.stash_rows.append(np.arange(start_row, start_row + chunk.end - chunk.begin))
        plan.stash_chunks.append(chunk)
    adds_up = state.last_central is not None and segment <= state.last_central
    compacts = storage.compacts and not state.by_block
    if not (compacts or selects or adds_up):
        return
    window_start = state.prompt_len - state.window
    first_row = start_row + window_start - chunk.begin
    if chunk.splits_window:
        begin = max(chunk.begin, window_start)
        assert state.slot is not None
        plan.window_rows.append(np.arange(begin, chunk.end) - chunk.begin + start_row)
        plan.window_places.append(np.arange(begin, chunk.end) - window_start)
        plan.window_slots.append(np.full(chunk.end - begin, state.slot))
    if chunk.is_last:
        plan.prompts.append(
            Prompt(
                req_id=state.req_id,
                batch_index=chunk.batch_index,
                num_keys=storage.rows,
                window=state.window,
                kernel=state.kernel,
                first_row=first_row,
                slot=state.slot if chunk.splits_window else None,
                cap=storage.kept if compacts else storage.rows,
                sinks=state.sinks,
                propagated=state.num_propagated if selects else 0,
                per_layer=state.per_layer,
                decay=state.decay if adds_up else None,
                ranks_blocks=state.by_block and segment == state.last_central,
                measures=state.online is not None,
                kept=tuple(
                    (s.kept if s.compacts else 0, i <= (state.last_central or 0))
                    for i, s in enumerate(state.storages)
                ),
            )
        )


@dataclass(frozen=True)
class Piece:
    """Selected tokens [begin, end) of one prompt, counted among its selected tokens."""

    chunk: PromptChunk
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.chunk.state.num_propagated


def pack_selected(chunks: Sequence[PromptChunk], max_tokens: int) -> list[list[Piece]]:
    """Passes of at most `max_tokens` rows over the selected tokens of these prompts, in order.

    A prompt's window stays in one pass, since its queries score the keys there.
    """
    sizes = [(chunk.state.num_propagated, chunk.state.window) for chunk in chunks]
    return [
        [Piece(chunks[i], begin, end) for i, begin, end in pieces]
        for pieces in pack(sizes, max_tokens)
    ]


def pack(sizes: Sequence[tuple[int, int]], max_tokens: int) -> list[list[tuple[int, int, int]]]:
    """Passes of at most `max_tokens` rows over prompts of (rows, window), in order.

    Each has pieces (prompt, begin, end); the last `window` rows of a prompt are in one pass.
    """
    passes: list[list[tuple[int, int, int]]] = []
    room = 0
    for index, (total, window) in enumerate(sizes):
        begin = 0
        while begin < total:
            end = min(begin + room, total)
            if 0 < total - end < window:
                end = total - window
            if end <= begin:
                passes.append([])
                room = max_tokens
                continue
            passes[-1].append((index, begin, end))
            room -= end - begin
            begin = end
    return passes
