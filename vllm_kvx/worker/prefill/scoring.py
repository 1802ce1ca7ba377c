"""What a prompt wants of the layers of a pass, and the batches that its layers make of it.

Planned on the host from counts alone. A `KeyScoring` is one scoring of one prompt's keys in a
layer, with all that is decided by it; layers with the same scorings share one batch of device
arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvx.policy.axes import Positions, ScoreSpec
from vllm_kvx.scores.base import ScoredPrompts


@dataclass(frozen=True)
class KeyScoring:
    """One scoring of a prompt's keys in a layer.

    Attributes:
        prompt: the prompt.
        spec: how the keys are scored.
        kept: entries that stay by these scores; the prompt's `num_keys` if they decide on none.
        over_heads: whether all KV heads keep the same entries.
        carried: the spec by whose decay the scores are added to the layers' below; None if not.
        selects: tokens to choose for the layers above; 0 if none are chosen here. last: the last
            ones of the prompt, which are among them whatever their scores.
        ranks: the prompt's blocks are ranked here.
        measures: entropy, sparsity and variance of the window's attention are kept.
    """

    prompt: "PassPrompt"
    spec: ScoreSpec
    kept: int
    over_heads: bool = False
    carried: ScoreSpec | None = None
    selects: int = 0
    last: int = 0
    ranks: bool = False
    measures: bool = False

    @property
    def window(self) -> int:
        return min(self.spec.window, self.prompt.num_keys)

    def merged(self, other: "KeyScoring") -> "KeyScoring | None":
        """Both in one scoring; None if they score differently."""
        mine, theirs = self.spec, other.spec
        if (mine.family, mine.window, mine.kernel) != (theirs.family, theirs.window, theirs.kernel):
            return None
        return replace(
            self,
            kept=min(self.kept, other.kept),
            over_heads=self.over_heads or other.over_heads,
            carried=self.carried or other.carried,
            selects=self.selects or other.selects,
            last=self.last or other.last,
            ranks=self.ranks or other.ranks,
            measures=self.measures or other.measures,
        )


@dataclass(frozen=True)
class PassPrompt:
    """A prompt that comes in with this step, as one pass sees it.

    Attributes:
        batch_index: its place in the step's batch.
        num_keys: entries that the pass's layers hold of it.
        first_row: row of the pass that holds the first query of the longest window; may be negative
            where a part of the window ran in an earlier chunk, which `slot` then holds.
        longest: that window's length.
        slot: where its window's queries are kept, or None if they are all in this pass.
        select_by, select_after, selected, last: the score that chooses the tokens to go on, the
            layer that chooses, how many, and the last ones among them; None, where the pass chooses
            none. A layer that the pass does not have means that the choice is made elsewhere.
        by: what retention goes by; None if no entry goes in this pass.
        kept: by stage, the entries that stay; all that there are where none goes.
        held: by stage, the entries that there are; empty where they are `num_keys` in each.
        ranked_after: the layer after which whole blocks are ranked; None where entries stay.
        blocks: by stage, as ``Centrality.rank_blocks`` takes it.
        measures: see ``KeyScoring``.
        drafted: how many of the keys, the last ones, are of drafted tokens, and go.
        stats_row: its policy's row in the counters.
    """

    req_id: str
    batch_index: int
    num_keys: int
    first_row: int
    longest: int
    slot: int | None = None
    select_by: ScoreSpec | None = None
    select_after: int = -1
    selected: int = 0
    last: int = 0
    by: ScoreSpec | Positions | None = None
    kept: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    ranked_after: int | None = None
    blocks: tuple[tuple[int, bool], ...] = ()
    measures: bool = False
    drafted: int = 0
    stats_row: int = 0

    def in_stage(self, stage: int) -> "PassPrompt":
        """The prompt as layers of a stage see it, `num_keys` being theirs."""
        return replace(self, num_keys=self.held[stage], held=()) if self.held else self

    def scorings(self, layer: int, stage: int) -> list[KeyScoring]:
        """What a layer scores of this prompt."""
        if self.held:
            return self.in_stage(stage).scorings(layer, stage)
        wanted = []
        by = self.select_by
        if by is not None and layer <= self.select_after:
            here = layer == self.select_after
            if here or by.decay is not None:
                carried = None if by.decay is None else by
                selects, last = (self.selected, self.last) if here else (0, 0)
                wanted.append(
                    KeyScoring(
                        self,
                        by,
                        self.num_keys,
                        carried=carried,
                        selects=selects,
                        last=last,
                        measures=self.measures,
                    )
                )
        if isinstance(self.by, ScoreSpec):
            if self.ranked_after is not None:
                if layer <= self.ranked_after:
                    ranks = layer == self.ranked_after
                    wanted.append(
                        KeyScoring(self, self.by, self.num_keys, carried=self.by, ranks=ranks)
                    )
            elif self.kept[stage] < self.num_keys:
                wanted.append(
                    KeyScoring(self, self.by, self.kept[stage], over_heads=self.by.over_heads)
                )
        if len(wanted) == 2 and (both := wanted[0].merged(wanted[1])) is not None:
            return [both]
        return wanted


@dataclass(frozen=True)
class WindowRows:
    """Window queries of one chunk that a later one needs: rows of the pass, and their places.

    by_policy: how many there are, by their policies' rows in the counters.
    """

    rows: Tensor  # (n,) int64
    slots: Tensor  # (n,) int64
    places: Tensor  # (n,) int64, index within the window
    by_policy: Mapping[int, int] = field(default_factory=dict)


class ScoringBatch:
    """The scorings of one family in a layer, with everything about them on the device.

    F scorings have T keys together. scorings: in the order of every (F,) array.
    prompts: all but the block tables, which differ by layer. columns: each scoring's slice of the
    scores' T columns. caps: (F,) int32, entries that stay, those of drafted tokens among them.
    policy_rows: (F,) int64, in the counters.
    moves: what is chosen from, without the keys of drafted tokens: they score, and none stays.
    """

    def __init__(
        self, scorings: Sequence[KeyScoring], max_window: int, device: torch.device
    ) -> None:
        self.scorings = scorings
        self._device = device
        counts = [each.prompt.num_keys for each in scorings]
        ends = np.cumsum(counts).tolist()
        self.columns = [slice(e - n, e) for n, e in zip(counts, ends, strict=True)]
        self.max_moves = max(
            min(j.kept - j.prompt.drafted, n - j.kept)
            for j, n in zip(scorings, counts, strict=True)
        )
        self.carries = any(each.carried is not None for each in scorings)
        self.needs_total = self.carries or any(each.over_heads or each.selects for each in scorings)
        self.needs_unpooled_total = any(each.over_heads or each.selects for each in scorings)
        self.caps = self.ints([each.kept for each in scorings])
        self.indices = self.longs([each.prompt.batch_index for each in scorings])
        self.policy_rows = self.longs([each.prompt.stats_row for each in scorings])
        # Rows that are not in this pass are read from row 0 and replaced.
        rows = np.zeros((len(scorings), max_window), dtype=np.int64)
        for row, each in zip(rows, scorings, strict=True):
            first = each.prompt.first_row + each.prompt.longest - each.window
            row[: each.window] = np.maximum(np.arange(first, first + each.window), 0)
            # A shorter window's early queries would lie elsewhere in their slot.
            assert each.prompt.slot is None or each.window in (0, each.prompt.longest)
        early = [
            (f, each.prompt.slot) for f, each in enumerate(scorings) if each.prompt.slot is not None
        ]
        num_keys = self.ints(counts)
        self.prompts = ScoredPrompts(
            block_tables=num_keys,  # Each layer's own takes its place.
            num_keys=num_keys,
            windows=self.ints([each.window for each in scorings]),
            kernels=self.ints([each.spec.kernel for each in scorings]),
            caps=self.caps,
            offsets=self.sums(counts),
            max_num_keys=max(counts),
            total_keys=sum(counts),
            # The server's longest: in a shorter one sums would be formed in another order.
            max_window=max_window,
            pools=any(each.spec.kernel > 1 for each in scorings),
            window_rows=async_tensor_h2d(rows.ravel(), device=device),
            early=(
                (self.longs([f for f, _ in early]), self.longs([s or 0 for _, s in early]))
                if early
                else None
            ),
        )
        self.moves = Moves.of(self)
        self.selecting = [f for f, each in enumerate(scorings) if each.selects]
        self.choice = Choice.of(self) if self.selecting else None

    def at(self, block_table: Tensor) -> ScoredPrompts:
        """The prompts in a layer whose batch has this (R, B) block table."""
        return replace(self.prompts, block_tables=block_table.index_select(0, self.indices))

    def ints(self, values: Sequence[int]) -> Tensor:
        """(n,) int32 on the device; `longs` are int64."""
        return async_tensor_h2d(np.array(values, dtype=np.int32), device=self._device)

    def longs(self, values: Sequence[int]) -> Tensor:
        return async_tensor_h2d(np.array(values, dtype=np.int64), device=self._device)

    def sums(self, counts: Sequence[int]) -> Tensor:
        """(n + 1,) int64 exclusive cumulative sum, on the device."""
        return async_tensor_h2d(np.cumsum([0, *counts], dtype=np.int64), device=self._device)


class Moves(NamedTuple):
    """Arguments of ``select_moves`` after the scores: what stays is among these keys."""

    num_keys: Tensor
    windows: Tensor
    caps: Tensor
    offsets: Tensor
    out_offsets: Tensor
    total: int

    @classmethod
    def of(cls, batch: ScoringBatch) -> "Moves":
        prompts, drafted = batch.prompts, [each.prompt.drafted for each in batch.scorings]
        caps = [each.kept - more for each, more in zip(batch.scorings, drafted, strict=True)]
        sizes = prompts.num_keys, prompts.windows, batch.caps
        if any(drafted):
            more = batch.ints(drafted)
            sizes = sizes[0] - more, sizes[1] - more, sizes[2] - more
        return cls(*sizes, prompts.offsets, batch.sums(caps), sum(caps))


class Choice(NamedTuple):
    """Arguments of ``select_kept`` after the scores, of the scorings that choose tokens."""

    num_keys: Tensor
    windows: Tensor
    counts: Tensor
    offsets: Tensor
    out_offsets: Tensor
    total: int

    @classmethod
    def of(cls, batch: ScoringBatch) -> "Choice":
        index, prompts = batch.longs(batch.selecting), batch.prompts
        counts = [batch.scorings[f].selects for f in batch.selecting]
        return cls(
            prompts.num_keys.index_select(0, index),
            batch.ints([batch.scorings[f].last for f in batch.selecting]),
            batch.ints(counts),
            prompts.offsets.index_select(0, index),
            batch.sums(counts),
            sum(counts),
        )


class PositionMoves:
    """Moves that are the same in every head: retention by position.

    Attributes:
        sources, targets: (G, n) int32, num_moves: (G, F) int32, offsets: (F + 1,) int64,
            max_moves: as ``move_entries`` takes them. indices: (F,) int64 places in the batch.
        policy_rows: (F,) int64, in the counters.
    """

    def __init__(
        self, prompts: Sequence[tuple[PassPrompt, int]], num_heads: int, device: torch.device
    ) -> None:
        """prompts: each with the entries that stay of it."""
        sources: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        for prompt, kept in prompts:
            assert isinstance(prompt.by, Positions)
            # The last kept - sinks entries stay; those beyond the first `kept` slots fill the gap.
            recent = prompt.num_keys - (kept - prompt.by.sinks)
            sources.append(np.arange(max(kept, recent), prompt.num_keys))
            targets.append(np.arange(prompt.by.sinks, min(kept, recent)))
        counts = [len(s) for s in sources]

        def everywhere(columns: list[np.ndarray]) -> Tensor:
            flat = async_tensor_h2d(np.concatenate(columns).astype(np.int32), device=device)
            return flat.expand(num_heads, -1).contiguous()

        self.sources, self.targets = everywhere(sources), everywhere(targets)
        count = async_tensor_h2d(np.array(counts, dtype=np.int32), device=device)
        self.num_moves = count.expand(num_heads, -1).contiguous()
        self.offsets = async_tensor_h2d(np.cumsum([0, *counts], dtype=np.int64), device=device)
        self.max_moves = max(counts)
        places = [prompt.batch_index for prompt, _ in prompts]
        rows = [prompt.stats_row for prompt, _ in prompts]
        self.indices, self.policy_rows = async_tensor_h2d(
            np.array([places, rows], dtype=np.int64), device=device
        )
