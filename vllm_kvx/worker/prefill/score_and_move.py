"""What happens beside a layer's attention in the step that brings a prompt in.

It runs right after a layer's attention: the layer's keys are in the cache, its queries at hand, and
nobody needs the entries any more that retention drops. So scores, the choice of tokens and the
compaction of a layer follow one another there, on the device, without a copy of the scores.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvx.cache.messages import PrivateBlocks
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.attention_metrics import window_metrics
from vllm_kvx.ops.prompt.move import copy_blocks, move_entries
from vllm_kvx.ops.prompt.select import select_kept, select_moves
from vllm_kvx.policy.axes import Positions
from vllm_kvx.scores.base import KeyScores, LayerView, Score, ScoredPrompts
from vllm_kvx.scores.table import SCORES
from vllm_kvx.worker.prefill.centrality import Centrality
from vllm_kvx.worker.prefill.scoring import (
    KeyScoring,
    PassPrompt,
    PositionMoves,
    ScoringBatch,
    WindowRows,
)
from vllm_kvx.worker.timing import PhaseTimer, Shares, shares_of


class PrefillBuffers:
    """What prompts that are coming in keep on the device from layer to layer and chunk to chunk.

    Attributes:
        queries: (slots, L, W, H, D) model dtype, windows that are spread over several chunks.
        all_queries: the same with the spare slot, which CUDA graphs write to and nobody reads.
        spare_slot: its number; None on a server without.
        max_window: W. num_kv_heads: G of this rank.
        private: by request id and KV group, the new blocks of what stays of prompts in the step.
        token_ids: (request states, tokens) int32, vLLM's own; None before the first step.
        moved: (rows,) int64, bytes that retention copied to another slot, by the policies' rows in
            the counters.
        timer, detector_timer: device time of all of it, and of centrality and metrics.
    """

    def __init__(
        self,
        attention: Sequence[Attention],
        split_windows: int,
        max_window: int,
        dtype: torch.dtype,
        device: torch.device,
        num_policies: int,
        has_spare: bool = False,
    ) -> None:
        """attention: the model's attention layers. split_windows: slots. num_policies: rows."""
        layer, slots = attention[0], split_windows if max_window else 0
        self.max_window, self.num_kv_heads = max_window, layer.num_kv_heads
        shape = (len(attention), max_window, layer.num_heads, layer.head_size)
        self.all_queries = torch.empty(slots + has_spare, *shape, dtype=dtype, device=device)
        self.queries = self.all_queries[:slots]
        self.spare_slot = slots if has_spare else None
        self.token_ids: Tensor | None = None
        self.private: Mapping[str, Sequence[PrivateBlocks | None]] = {}
        self.centrality = Centrality()
        self.moved = torch.zeros(num_policies, dtype=torch.int64, device=device)
        self.timer, self.detector_timer = PhaseTimer(device), PhaseTimer(device)
        self.device = device

    def reset_counters(self) -> None:
        """Counts moves and device time anew."""
        self.moved.zero_()
        self.timer, self.detector_timer = PhaseTimer(self.device), PhaseTimer(self.device)


class ScoredLayer(Protocol):
    """What the work beside a layer asks of its hook; see ``LayerHook``."""

    place: int
    index: int
    number: int
    stage: int
    group: int

    def view(self, query: Tensor, early_queries: Tensor, paged: PagedKV) -> LayerView: ...


class _Moves(NamedTuple):
    """Arguments of ``move_entries`` after the cache."""

    block_tables: Tensor
    sources: Tensor
    targets: Tensor
    num_moves: Tensor
    offsets: Tensor
    max_moves: int
    target_tables: Tensor


class _Targets(NamedTuple):
    """Where entries of prompts that are in move to, in one KV group.

    tables: (R, B) int32, the batch's block tables with new blocks in their places.
    sources, blocks: (n,) int64, the blocks whose places are taken, and the new ones.
    """

    tables: Tensor
    sources: Tensor | None = None
    blocks: Tensor | None = None


class PassWork:
    """The work of one pass beside the attention of its layers.

    Where a layer is split its keys are scored before its attention, which reads all of them: the
    moves wait until the work of another pass over the layer, which has it as `earlier`, is run.
    That of a pass over chosen tokens has no work of its own there: it begins at layer `first`.

    chosen: by request, the tokens that were chosen to go on, (m,) int32 ascending; written by the
        layer that chooses.
    shares: of the pass's time by policy, in proportion to the keys of prompts that are in, and to
        the window queries of others.
    """

    def __init__(
        self,
        prompts: Sequence[PassPrompt],
        windows: WindowRows | None,
        block_tables: Sequence[Tensor],
        memory: PrefillBuffers,
        earlier: "PassWork | None" = None,
        waits: bool = False,
        first: int = 0,
    ) -> None:
        """prompts: those that are in with the step. block_tables: (R, B) int32, by KV group.

        waits: whether moves wait; earlier: the work of which some do.
        """
        self.earlier, self.waits, self.first = earlier, waits, first
        self._waiting: dict[int, list[tuple[_Moves, Tensor]]] = {}
        self.prompts, self.windows = prompts, windows
        self.block_tables, self.memory = block_tables, memory
        self.chosen: dict[str, Tensor] = {}
        self._batches: dict[tuple[KeyScoring, ...], list[ScoringBatch]] = {}
        self._moves: dict[int, PositionMoves | None] = {}
        self._targets: dict[int, _Targets] = {}
        waiting = windows.by_policy.items() if windows is not None else ()
        self.shares = shares_of([*((p.stats_row, p.num_keys) for p in prompts), *waiting])

    @classmethod
    def of(
        cls,
        prompts: Sequence[PassPrompt],
        windows: WindowRows | None,
        block_tables: Sequence[Tensor],
        memory: PrefillBuffers,
        earlier: "PassWork | None" = None,
        waits: bool = False,
        first: int = 0,
    ) -> "PassWork | None":
        """The work for these prompts; None if there is nothing to do."""
        if not prompts and windows is None and earlier is None:
            return None
        return cls(prompts, windows, block_tables, memory, earlier, waits, first)

    @property
    def only_keeps(self) -> bool:
        """Whether it keeps window queries, and does nothing else."""
        return self.windows is not None and not self.prompts and self.earlier is None

    def run(self, hook: ScoredLayer, query: Tensor, paged: PagedKV) -> None:
        """Does one layer's part of the work; query: (N, H, D), of the pass's rows."""
        memory = self.memory
        if self.earlier is not None:
            self.earlier.move(hook, paged)
        if hook.number < self.first or not (self.prompts or self.windows):
            return
        with memory.timer.of(self.shares):
            if self.windows is not None:
                rows = query.index_select(0, self.windows.rows)
                memory.queries[self.windows.slots, hook.place, self.windows.places] = rows
            table, targets = self.block_tables[hook.group], self.targets(hook.group)
            view = hook.view(query, memory.queries[:, hook.place], paged)
            # All scores before the first move: a prompt may be scored by two families.
            decided = [
                (self._decide(batch, batch.at(table), view, targets.tables), batch.policy_rows)
                for batch in self._batches_of(hook.number, hook.stage)
            ]
            moves = [(each, rows) for each, rows in decided if each is not None]
            fixed = self._moves_of(hook.stage)
            if fixed is not None:
                by_rule = _Moves(
                    table.index_select(0, fixed.indices),
                    fixed.sources,
                    fixed.targets,
                    fixed.num_moves,
                    fixed.offsets,
                    fixed.max_moves,
                    targets.tables.index_select(0, fixed.indices),
                )
                moves.append((by_rule, fixed.policy_rows))
            self._waiting[hook.index] = moves
            if not self.waits:
                self._move(hook, paged)

    def move(self, hook: ScoredLayer, paged: PagedKV) -> None:
        """The moves of a layer that waited, if there are any; once."""
        if hook.index in self._waiting:
            with self.memory.timer.of(self.shares):
                self._move(hook, paged)

    def _move(self, hook: ScoredLayer, paged: PagedKV) -> None:
        targets, memory = self.targets(hook.group), self.memory
        if targets.sources is not None and targets.blocks is not None:
            # With the entries that keep their slots; the others come over them.
            copy_blocks(paged, targets.sources, targets.blocks)
        for each, policy_rows in self._waiting.pop(hook.index):
            move_entries(paged, *each)
            moved = each.num_moves.sum(dim=0) * paged.entry_bytes
            memory.moved.index_add_(0, policy_rows, moved)

    def targets(self, group: int) -> _Targets:
        """The blocks that entries of a KV group move to: their own, if no others are given."""
        if group not in self._targets:
            table, device = self.block_tables[group], self.memory.device
            moved = [
                (prompt.batch_index, by_group[group])
                for prompt in self.prompts
                if (by_group := self.memory.private.get(prompt.req_id)) is not None
            ]
            rows = [np.full(len(at.places), row) for row, at in moved if at is not None]
            if not rows:
                return self._targets.setdefault(group, _Targets(table))
            columns = [np.array(at.places, dtype=np.int64) for _, at in moved if at is not None]
            blocks = [np.array(at.blocks, dtype=np.int64) for _, at in moved if at is not None]
            row, column, block = (
                async_tensor_h2d(np.concatenate(parts), device=device)
                for parts in (rows, columns, blocks)
            )
            tables, sources = table.clone(), table[row, column].long()
            tables[row, column] = block.int()
            self._targets[group] = _Targets(tables, sources, block)
        return self._targets[group]

    def _batches_of(self, layer: int, stage: int) -> list[ScoringBatch]:
        scorings = tuple(each for prompt in self.prompts for each in prompt.scorings(layer, stage))
        if scorings not in self._batches:
            family, memory = attrgetter("spec.family"), self.memory
            by_family = groupby(sorted(scorings, key=family), key=family)
            self._batches[scorings] = [
                ScoringBatch(list(same), memory.max_window, memory.device) for _, same in by_family
            ]
        return self._batches[scorings]

    def _moves_of(self, stage: int) -> PositionMoves | None:
        if stage not in self._moves:
            prompts = [
                (prompt, prompt.kept[stage])
                for prompt in self.prompts
                if isinstance(prompt.by, Positions) and prompt.kept[stage] < prompt.num_keys
            ]
            memory = self.memory
            self._moves[stage] = (
                PositionMoves(prompts, memory.num_kv_heads, memory.device) if prompts else None
            )
        return self._moves[stage]

    def _decide(
        self, batch: ScoringBatch, prompts: ScoredPrompts, view: LayerView, targets: Tensor
    ) -> _Moves | None:
        """Scores a layer's keys and does all that is decided by them but the moves."""
        memory, scorings = self.memory, batch.scorings
        family = SCORES[scorings[0].spec.family]
        rated = total = family.score(prompts, view)
        if any(each.measures for each in scorings):
            self._measure(batch, prompts, view)
        if batch.needs_total:
            total = _over_heads(family, rated, batch.needs_unpooled_total)
            total = family.settled(total, prompts)
        sums: dict[int, Tensor] = {}
        if batch.carries:
            with memory.detector_timer.of(_shares(s for s in scorings if s.carried is not None)):
                for f, each in enumerate(scorings):
                    if each.carried is not None:
                        now = total.scores[0, batch.columns[f]]
                        sums[f] = memory.centrality.add(each.prompt.req_id, each.carried, now)
        if batch.choice is not None:
            by, peaks = total.scores, total.unpooled
            if sums:
                by, peaks = by.clone(), None if peaks is None else peaks.clone()
            for f, values in sums.items():
                by[0, batch.columns[f]] = values
                if peaks is not None:  # Nothing of a sum over layers is pooled.
                    peaks[0, batch.columns[f]] = values
            kept = select_kept(by, *batch.choice, unpooled=peaks)[0]
            end = 0
            for f in batch.selecting:
                begin, end = end, end + scorings[f].selects
                self.chosen[scorings[f].prompt.req_id] = kept[begin:end]
        for f in sums:
            each = scorings[f]
            if each.ranks:
                memory.centrality.rank_blocks(
                    each.prompt.req_id,
                    self.chosen.get(each.prompt.req_id),
                    each.prompt.blocks,
                    view.paged.block_size,
                    each.window,
                )
            if each.ranks or each.selects:
                memory.centrality.end(each.prompt.req_id)
        if not batch.max_moves:
            return None
        return self._moves_by(rated, total, batch, prompts, view.paged.num_heads, targets)

    def _moves_by(
        self,
        rated: KeyScores,
        total: KeyScores,
        batch: ScoringBatch,
        prompts: ScoredPrompts,
        num_heads: int,
        target_tables: Tensor,
    ) -> _Moves:
        if all(each.over_heads for each in batch.scorings):
            rated = total
        elif any(each.over_heads for each in batch.scorings):
            for mine, of_all in zip(rated, total, strict=True):
                for columns, each in zip(batch.columns, batch.scorings, strict=True):
                    if each.over_heads and mine is not None and of_all is not None:
                        mine[:, columns] = of_all[:, columns]
        sources, targets, num_moves = select_moves(
            rated.scores, *batch.moves, unpooled=rated.unpooled
        )
        if rated.scores.shape[0] < num_heads:  # One choice for all heads.
            sources, targets, num_moves = (
                choice.expand(num_heads, -1) for choice in (sources, targets, num_moves)
            )
        return _Moves(
            prompts.block_tables,
            sources,
            targets,
            num_moves.contiguous(),
            batch.moves.out_offsets,
            batch.max_moves,
            target_tables.index_select(0, batch.indices),
        )

    def _measure(self, batch: ScoringBatch, prompts: ScoredPrompts, view: LayerView) -> None:
        measured = [f for f, each in enumerate(batch.scorings) if each.measures]
        index = async_tensor_h2d(np.array(measured, dtype=np.int64), device=view.query.device)
        with self.memory.detector_timer.of(_shares(batch.scorings[f] for f in measured)):
            heads = window_metrics(
                prompts.window_queries(view)[index],
                view.paged,
                prompts.block_tables[index],
                prompts.num_keys[index],
                prompts.windows[index],
                max(batch.scorings[f].prompt.num_keys for f in measured),
                view.scale,
                key_scale=view.key_scale,
                soft_cap=view.soft_cap,
                sinks=view.sinks,
            )
            # As for the scores: every rank averages over all heads, in their order.
            means = tensor_model_parallel_all_gather(heads, dim=1).double().mean(dim=1)
        for f, values in zip(measured, means, strict=True):
            req_id = batch.scorings[f].prompt.req_id
            self.memory.centrality.metrics.setdefault(req_id, []).append(values)


def _shares(scorings: Iterable[KeyScoring]) -> Shares:
    """The shares of work on the keys of these scorings, by policy."""
    return shares_of((each.prompt.stats_row, each.prompt.num_keys) for each in scorings)


def _over_heads(family: Score, rated: KeyScores, with_unpooled: bool) -> KeyScores:
    """One score of each key for all heads, (1, n).

    Every rank has some of the heads, and all must choose the tokens that one would: so the heads of
    all ranks are gathered, and reduced in their order.
    """
    wanted = rated if with_unpooled else rated._replace(unpooled=None)
    parts = {name: part for name, part in wanted._asdict().items() if part is not None}
    # One collective for all.
    gathered = tensor_model_parallel_all_gather(
        torch.cat(list(parts.values()), dim=1) if len(parts) > 1 else rated.scores, dim=0
    )
    each = map(family.over_heads, gathered.chunk(len(parts), dim=1))
    return KeyScores(**dict(zip(parts, each, strict=True)))
