"""The prompts that a policy changes once they are in, and their chunks in a step.

Planned on the host from counts alone; which tokens are chosen is known on the device only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vllm_kvx.policy.axes import Positions, Retain, ScoreSpec, Selection
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import Storage
from vllm_kvx.worker.batch import to_device
from vllm_kvx.worker.prefill.score_and_move import PassWork, PrefillBuffers
from vllm_kvx.worker.prefill.scoring import PassPrompt, WindowRows


@dataclass
class PromptState:
    """A request whose prompt is scored, selected from or compacted.

    Attributes:
        settles_at: its tokens, and the generated ones that retention waits for. Until then all of
            them count as its prompt here.
        starts: the first layer of every KV stage; storages: what it stores, by stage.
        selection: which tokens are chosen to go on; None if all do.
        retain: drops entries of at least one stage; None if none does.
        drafted: tokens that are drafted behind it, to score its keys with the window.
        slot: where its window's queries are kept while it is spread over chunks or these tokens.
        stats_row: its policy's row in the counters. skipped: layer-tokens that its chunks left out.
        split_layers: the layers that are split on this server.
        then: its state once its tokens are chosen, where retention waits for more of them; `slot`
            is the same. None where one step does both, or neither is done.
        follows: it is such a state: stages above the choice hold the chosen tokens alone.
    """

    req_id: str
    settles_at: int
    starts: Sequence[int]
    storages: list[Storage]
    selection: Selection | None
    retain: Retain | None
    drafted: int = 0
    slot: int | None = None
    stats_row: int = 0
    skipped: int = 0
    split_layers: frozenset[int] = frozenset()
    then: "PromptState | None" = None
    follows: bool = False

    @classmethod
    def of(
        cls,
        req_id: str,
        policy: KVPolicy,
        prompt_len: int,
        starts: Sequence[int],
        storages: list[Storage],
        num_layers: int,
        split_layers: frozenset[int] = frozenset(),
    ) -> "PromptState | None":
        """The state of a request; None if its policy changes nothing once the prompt is in.

        storages: what it stores, by stage. split_layers: the layers that are split.
        """
        if not any(s.changes for s in storages):
            return None
        selection = policy.selection(prompt_len, num_layers)
        settles_at = prompt_len + policy.num_generated
        then = None
        if all(s.chosen_at is not None for s in storages):
            if any(s.compacts for s in storages):
                later = [s.once_chosen for s in storages]
                then = cls(req_id, settles_at, starts, later, None, policy.retain, follows=True)
            storages, settles_at = [s.until_chosen for s in storages], prompt_len
        drafted = policy.num_drafted(prompt_len)
        state = cls(req_id, settles_at, starts, storages, selection, policy.retain, drafted)
        if not any(map(state.drops, range(len(starts)))):
            state.retain = None
        state.split_layers, state.then = split_layers, then
        return state

    @property
    def cut_to(self) -> list[Storage]:
        """What block tables hold from its last step on, by stage; empty if they hold all still."""
        return self.storages if self.then is None else []

    @property
    def by(self) -> ScoreSpec | Positions | None:
        """What retention goes by; None if no entry goes by it."""
        return self.retain.keeps_by if self.retain is not None else None

    @property
    def by_block(self) -> bool:
        """Whether whole blocks stay, which are re-linked instead of copied."""
        return self.retain is not None and self.retain.unit == "block"

    @cached_property
    def window(self) -> int:
        """The longest window whose queries score the prompt's keys; 0 if none does.

        Of these, without the drafted ones. Asked for in every step in which requests wait.
        """
        specs = [self.selection.score if self.selection is not None else None, self.by]
        windows = [spec.window - spec.drafted for spec in specs if isinstance(spec, ScoreSpec)]
        return min(max(windows, default=0), self.settles_at)

    @property
    def is_online(self) -> bool:
        """Whether the layer that selects is found during the pass."""
        return self.selection is not None and self.selection.online is not None

    @property
    def waits(self) -> bool:
        """Whether its states wait in the stash until tokens are chosen."""
        return self.selection is not None and self.selection.resumes_at > 0

    @property
    def is_split(self) -> bool:
        """Whether the layer that selects is split."""
        selection = self.selection
        return selection is not None and not self.is_online and selection.after in self.split_layers

    @property
    def resumes_at(self) -> int:
        """The first layer that its chosen tokens run: the one that selects, if it is split."""
        assert self.selection is not None
        first = self.selection.resumes_at
        return self.selection.after if first and self.is_split else first

    def runs_whole(self, layer: int) -> bool:
        """Whether passes over the batch run every row of the prompt in `layer`.

        Where it is split they store every row, and run those that go on.
        """
        stage = sum(start <= layer for start in self.starts) - 1
        return self.follows or (not self.is_online and self.storages[stage].prefill.size == 0)

    def is_resumed(self, stage: int) -> bool:
        """Whether the chosen tokens run the stage's layers, which then hold those alone."""
        selection = self.selection
        if selection is None or selection.online is not None:
            return False
        return self.starts[stage] >= selection.resumes_at

    def drops(self, stage: int) -> bool:
        """Whether retention drops entries of the stage."""
        rows = self.storages[stage].rows
        if self.selection is not None and self.is_resumed(stage):
            rows = self.selection.count
        return self.storages[stage].kept < rows

    def is_moved(self, stage: int) -> bool:
        """Whether entries of the stage get other places, so that nothing of them can be read on."""
        if self.is_online:
            return True
        rewritten = self.is_resumed(stage) and self.storages[stage].prefill.size == 0
        return rewritten or (self.storages[stage].compacts and not self.by_block)

    def in_direct_pass(
        self, batch_index: int, first_row: int, begins_at: int, splits: bool
    ) -> PassPrompt:
        """The prompt in a pass over all of it; see ``PassPrompt``.

        first_row: of its last chunk in the pass. begins_at: the chunk's first position.
        splits: whether a part of the window ran in an earlier chunk.
        """
        num_keys, selection = self.settles_at, self.selection
        kept = tuple(
            storage.kept
            if self.follows or not (self.is_resumed(stage) or storage.prefill.size)
            else num_keys
            for stage, storage in enumerate(self.storages)
        )
        return PassPrompt(
            self.req_id,
            batch_index,
            num_keys,
            first_row=first_row + self.settles_at - self.window - begins_at,
            longest=self.window,
            slot=self.slot if splits else None,
            select_by=selection.score if selection is not None else None,
            # Found online, the layer is none of the pass's.
            select_after=(1 << 30) if self.is_online else selection.after if selection else -1,
            selected=selection.count if selection is not None else 0,
            last=selection.last if selection is not None else 0,
            by=self.by,
            kept=kept,
            held=tuple(storage.rows for storage in self.storages) if self.follows else (),
            ranked_after=self.retain.ranked_after() if self.retain is not None else None,
            blocks=self._blocks() if self.by_block else (),
            measures=self.is_online,
            stats_row=self.stats_row,
        )

    def in_drafted_pass(self, batch_index: int, row: int) -> PassPrompt:
        """The prompt in the pass over the last token that is drafted behind it, at `row`.

        All queries that score are in `slot`. Nothing of what is drafted stays.
        """
        assert self.slot is not None
        longest = self.window + self.drafted
        return PassPrompt(
            self.req_id,
            batch_index,
            self.settles_at + self.drafted,
            first_row=row + 1 - longest,
            longest=longest,
            slot=self.slot,
            by=self.by,
            kept=tuple(storage.kept + self.drafted for storage in self.storages),
            drafted=self.drafted,
            stats_row=self.stats_row,
        )

    def in_resumed_pass(self, batch_index: int, end_row: int) -> PassPrompt:
        """The prompt in a pass over its chosen tokens, the last of which is before `end_row`."""
        assert self.selection is not None
        num_keys = self.selection.count
        kept = tuple(
            storage.kept if self.is_resumed(stage) and not self.by_block else num_keys
            for stage, storage in enumerate(self.storages)
        )
        window = min(self.window, num_keys)
        return PassPrompt(
            self.req_id,
            batch_index,
            num_keys,
            first_row=end_row - window,
            longest=window,
            by=None if self.by_block else self.by,
            kept=kept,
            stats_row=self.stats_row,
        )

    def _blocks(self) -> tuple[tuple[int, bool], ...]:
        assert self.retain is not None
        after = self.retain.ranked_after()
        assert after is not None
        return tuple(
            (storage.kept if storage.compacts else 0, start <= after)
            for start, storage in zip(self.starts, self.storages, strict=True)
        )


@dataclass(frozen=True)
class PromptChunk:
    """One prompt's part of a step: its place in the batch, and positions [begin, end)."""

    state: PromptState
    batch_index: int
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.state.settles_at

    @property
    def first_query(self) -> int:
        """The position from which on its queries are asked for; `end` if none is.

        Those of the window, and once the prompt is in the last one, if only to stand for none.
        """
        if not (self.is_last or self.splits_window):
            return self.end
        return min(max(self.begin, self.state.settles_at - self.state.window), self.end - 1)

    @property
    def splits_window(self) -> bool:
        """Whether a part of the window, not all of it, is in this chunk.

        Drafted tokens are the rest of it, or generated ones.
        """
        window = self.state.window
        window_start = self.state.settles_at - window
        if not window or self.end <= window_start:
            return False
        is_more = self.state.drafted > 0 or self.state.then is not None
        return self.begin > window_start or not self.is_last or is_more


@dataclass
class ChunkPlan:
    """The chunks of one pass over whole prompts.

    Attributes:
        prompts: those whose last chunk is in the step.
        window_rows, window_slots, window_places: (n,) int64 queries to keep; see ``WindowRows``.
        windows_by_policy: how many these are, by their policies' rows in the counters.
        stash_rows: (n,) int64 rows of the pass's output whose states wait.
        stash_chunks: the chunks that they are of.
    """

    prompts: list[PassPrompt] = field(default_factory=list)
    window_rows: list[np.ndarray] = field(default_factory=list)
    window_slots: list[np.ndarray] = field(default_factory=list)
    window_places: list[np.ndarray] = field(default_factory=list)
    windows_by_policy: dict[int, int] = field(default_factory=dict)
    stash_rows: list[np.ndarray] = field(default_factory=list)
    stash_chunks: list[PromptChunk] = field(default_factory=list)

    def add(self, chunk: PromptChunk, first_row: int, end_layer: int) -> None:
        """Adds a chunk whose rows begin at `first_row` of the pass.

        end_layer: the first layer that the pass does not run.
        """
        state = chunk.state
        if state.waits and not state.is_online and state.resumes_at == end_layer:
            count = chunk.end - chunk.begin
            self.stash_rows.append(np.arange(first_row, first_row + count))
            self.stash_chunks.append(chunk)
        if chunk.splits_window:
            window_start = state.settles_at - state.window
            begin = max(chunk.begin, window_start)
            places = np.arange(begin, chunk.end) - window_start
            self._keep(state, places, begin - chunk.begin + first_row)
        if chunk.is_last and not state.drafted:
            self.prompts.append(
                state.in_direct_pass(chunk.batch_index, first_row, chunk.begin, chunk.splits_window)
            )

    def keep_window(self, state: PromptState, end_row: int) -> None:
        """Keeps the queries of a prompt's window, whose rows end before `end_row` of the pass."""
        self._keep(state, np.arange(state.window), end_row - state.window)

    def _keep(self, state: PromptState, places: np.ndarray, first_row: int) -> None:
        """Keeps the queries of rows from `first_row` on at these places of the window."""
        assert state.slot is not None
        count, rows = len(places), self.windows_by_policy
        self.window_rows.append(np.arange(first_row, first_row + count))
        self.window_places.append(places)
        self.window_slots.append(np.full(count, state.slot))
        rows[state.stats_row] = rows.get(state.stats_row, 0) + count

    def windows(self, device: torch.device) -> WindowRows | None:
        """The queries to keep, on the device; None if there are none."""
        if not self.window_rows:
            return None
        rows, slots, places = (
            to_device(np.concatenate(parts), device)
            for parts in (self.window_rows, self.window_slots, self.window_places)
        )
        return WindowRows(rows, slots, places, self.windows_by_policy)

    def work(
        self,
        block_tables: Sequence[Tensor],
        memory: PrefillBuffers,
        earlier: PassWork | None = None,
        waits: bool = False,
    ) -> PassWork | None:
        """Its work beside the pass's layers; see ``PassWork.of``."""
        windows = self.windows(memory.device)
        return PassWork.of(self.prompts, windows, block_tables, memory, earlier, waits)
