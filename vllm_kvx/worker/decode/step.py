"""A step's retrieval, planned on the host: which rows read selected entries only, in which stage.

Lengths alone decide, a request's own and those of the others in the step, so nothing is read back
from the device. A decode step replays one of several CUDA graphs: nobody retrieves; everybody does,
and stock attention is left out of the layers that retrieve, which depend on the policy; or some do,
and stock attention runs over all rows, those that retrieve cut to one entry.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.costs import Costs, StepCosts
from vllm_kvx.ops.retrieval.rows import RetrievalRows, room_of
from vllm_kvx.policy import storage
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import IntArray


class HookedLayer(Protocol):
    """A layer beside whose attention retrieval runs."""

    @property
    def layer(self) -> Any:
        """vLLM's attention layer; its classes do not declare what we read of it."""

    @property
    def place(self) -> int:
        """The layer's place among this worker's, from 0."""

    @property
    def index(self) -> int:
        """The layer's number in the model, from 0."""

    @property
    def stage(self) -> int:
        """The number of the KV stage that the layer belongs to."""

    @property
    def group(self) -> int:
        """Its KV group; known once vLLM has formed the groups."""

    @property
    def soft_cap(self) -> float | None:
        """Of the softmax's logits; None without. See ``equations.softmax``."""

    @property
    def sinks(self) -> Tensor | None:
        """(H,) of the softmax; None without."""

    def paged(self) -> PagedKV:
        """Its KV cache, entry by entry."""

    def key_scale(self, paged: PagedKV) -> float:
        """What a stored key is multiplied with to get the key."""

    def value_scale(self, paged: PagedKV) -> float:
        """What a stored value is multiplied with to get the value."""


class Mode(Enum):
    """What a stage's layers run above the dense ones: stock attention, retrieval, or both."""

    DENSE = "dense"
    ALL = "all"
    MIXED = "mixed"


# By stage.
Modes = tuple[Mode, ...]


@dataclass(frozen=True)
class Rules:
    """The lengths from which on requests retrieve, and what they read then.

    Attributes:
        budgets: (R,) units to read, 0 of requests that never retrieve.
        least: (R,) entries; a row that sees fewer reads them all, others retrieve where the step's
            batch pays.
        floors: (R,) entries; a row that sees no fewer retrieves, whoever else does; never below
            `least`.
        unit: tokens of a unit.
    """

    budgets: IntArray
    least: IntArray
    floors: IntArray
    unit: int

    def of(self, requests: np.ndarray) -> "Rules":
        """Those of `requests`, in order."""
        budgets, least, floors = self.budgets, self.least, self.floors
        return Rules(budgets[requests], least[requests], floors[requests], self.unit)


@dataclass
class RetrievalPass:
    """What the running pass retrieves, in every stage.

    Attributes:
        modes: by stage.
        batches: by stage, rows in batches whose scores fit; at_split: by layer, where one that is
            split runs fewer rows than its stage.
        block_tables: by KV group, (B, max_blocks) int32.
        writes: each layer's groups are quantised beside it, since rows of this pass read them.
        full_groups: which these are, where a CUDA graph writes them; else as planned.
        most_chosen: rows of several batches whose choices are kept at once, at most.
        sampled: (R,) int64 the requests' policies as rows in the counters, if recall is measured.
    """

    modes: Modes
    batches: Sequence[Sequence[RetrievalRows]]
    block_tables: Sequence[Tensor]
    writes: bool = False
    sampled: IntArray | None = None
    at_split: Mapping[int, Sequence[RetrievalRows]] = field(default_factory=dict)
    full_groups: Tensor | None = None
    most_chosen: int = 0

    @property
    def each_chooses(self) -> np.ndarray:
        """(S,) bool, the stages with more rows than have their choices kept, so that no layer can
        go by another's."""
        return np.array([not self.are_kept(batches) for batches in self.batches])

    def are_kept(self, batches: Sequence[RetrievalRows]) -> bool:
        """Whether all choices of a layer with these rows are kept until its last batch has run."""
        return len(batches) <= 1 or sum(len(rows.lens) for rows in batches) <= self.most_chosen

    def rows_of(self, layer: HookedLayer) -> Sequence[RetrievalRows]:
        """The batches of one layer."""
        return self.at_split.get(layer.index, self.batches[layer.stage])


@dataclass(frozen=True)
class HostRows:
    """Rows of one stage that retrieve, as (R,) columns; see ``RetrievalRows``."""

    tokens: np.ndarray
    requests: np.ndarray
    lens: IntArray

    def batches(self, unit: int, capacity: int, max_rows: int) -> Iterator["HostRows"]:
        """The rows in order, in batches of at most `max_rows` whose scores fit `capacity`."""
        begin = 0
        room = np.cumsum(room_of(self.lens, unit))
        while begin < len(self.lens):
            before = room[begin - 1] if begin else 0
            end = int(np.searchsorted(room, before + capacity, side="right"))
            part = slice(begin, min(end, begin + max_rows))
            yield HostRows(self.tokens[part], self.requests[part], self.lens[part])
            begin = part.stop


@dataclass
class RetrievalStep:
    """A real step.

    Attributes:
        lens: (S, R) entries that each request's only row sees, 0 where it does not retrieve.
        chunks: requests, by batch index, several of whose generated tokens run at once: those that
            resume, and those whose tokens are drafted.
        whole: (S, R) the rows of each request all of whose rows retrieve, 0 of the others.
        some: (S,) bool, whether any row retrieves.
        rules: of the requests.
        counts: (R,) rows of each request. sees: (S, R) entries seen by its last one.
        generated: (R,) tokens past its prompt, the step's included; not positive within it.
        unknown: (R,) tokens, drafted in the step before, of which it is not known whether they
            stay: all others count them among those that are there.
        sampled: see ``RetrievalPass``.
        filled: (n, 3) int32, groups that requests with several rows fill, which one row may write
            and a later one read; see ``Writer.write``. None for none.
    """

    lens: IntArray
    chunks: list[int]
    whole: IntArray
    some: np.ndarray
    rules: Rules
    counts: IntArray
    sees: IntArray
    generated: IntArray
    unknown: IntArray
    sampled: IntArray | None = None
    filled: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        rules: Rules,
        costs: StepCosts,
        unknown: IntArray,
        begins: IntArray,
        counts: IntArray,
        prompt_lens: IntArray,
        stored_lens: IntArray,
        is_fresh: np.ndarray | None,
    ) -> "RetrievalStep":
        """The step of requests with these rules; the other arguments as ``Retrieval.plan``."""
        ends, num_rows = begins + counts, int(counts.sum())
        generates = (ends > prompt_lens) & (rules.budgets > 0)
        by_itself, chunks = generates, list[int]()
        if is_fresh is not None or num_rows > len(counts):
            # A request that resumes may read a prefix that another request computes in this step.
            several = (counts > 1) if is_fresh is None else (counts > 1) | is_fresh
            several &= generates
            by_itself, chunks = generates & ~several, np.flatnonzero(several).tolist()
        lens = retrieving_lens(rules, costs.of(num_rows), by_itself, stored_lens)
        whole = (lens > 0).astype(np.int64)
        if unknown.any():
            # Which it is of those whose floors lie among what is unknown, the device knows.
            sure = (stored_lens - unknown >= rules.floors) | (stored_lens < rules.floors)
            whole *= sure
        some: np.ndarray = np.any(lens, axis=1)
        if chunks:
            # Past their prompts each row sees one entry more than the one before.
            some |= np.any(several & (stored_lens >= rules.floors), axis=1)
            first_sees = stored_lens - (counts - 1)
            first_sees -= unknown
            from_first = several & (begins >= prompt_lens) & (first_sees >= rules.floors)
            whole = np.where(from_first, counts, whole)
        generated = ends - prompt_lens
        return cls(lens, chunks, whole, some, rules, counts, stored_lens, generated, unknown)

    @property
    def budgets(self) -> IntArray:
        """The units that each request reads, (R,); 0 if it never retrieves."""
        return self.rules.budgets

    @cached_property
    def modes(self) -> Modes:
        """What each stage has to run."""
        return tuple(
            Mode.DENSE if not some else Mode.ALL if whole.all() else Mode.MIXED
            for some, whole in zip(self.some.tolist(), self.whole, strict=True)
        )

    @cached_property
    def each_row(self) -> tuple[IntArray, IntArray]:
        """Of a step that runs all of its rows in every stage: whose each row is, and what it reads.

        Returns (N,) requests, by batch index, and (S, N) entries that each row sees, 0 where it
        does not retrieve.
        """
        if (self.counts == 1).all():
            return np.arange(len(self.counts)), self.lens
        requests, after = rows_of(self.counts)
        lens = np.where(after == 0, self.lens[:, requests], 0)
        if self.chunks:
            several = np.zeros(len(self.counts), dtype=bool)
            several[self.chunks] = True
            past = several[requests] & (after < self.generated[requests])
            # Past their prompts each row sees one entry more than the one before.
            seen = self.sees[:, requests] - after
            lens = np.where(past & (seen >= self.rules.floors[requests]), seen, lens)
        return requests, lens

    def floors_of(self, requests: np.ndarray, lens: IntArray) -> IntArray:
        """Entries below which rows that may retrieve do not, once their numbers are known.

        requests: (N,) by batch index. lens: (..., N) entries that each sees at most; fewer than its
            floor where the batch decides, whatever the number.
        """
        floors = self.rules.floors[requests]
        return np.where(lens >= floors, floors, 0)

    def rows(
        self,
        stage: int,
        run: IntArray,
        begins: IntArray,
        ends: IntArray,
        prompt_lens: IntArray,
        gaps: tuple[IntArray, IntArray],
    ) -> HostRows:
        """The rows of a stage that retrieve, the chunks' rows last.

        Args:
            run: (R,) rows that the stage runs of each request, the last ones.
            begins, ends, prompt_lens: (R,) logical. gaps: (R,) starts and sizes in this stage.
        """
        row_ends = np.cumsum(run)
        requests = np.flatnonzero(self.lens[stage])
        tokens, lens = row_ends[requests] - 1, self.lens[stage][requests]
        for i in self.chunks:
            length = np.arange(max(begins[i], prompt_lens[i]), ends[i]) + 1
            seen = storage.stored_lens(length, gaps[0][i], gaps[1][i])
            # What these tokens read at first may have depended on who else was in their steps.
            retrieves = seen >= self.rules.floors[i]
            tokens = np.append(tokens, (row_ends[i] - 1 - (ends[i] - length))[retrieves])
            lens = np.append(lens, seen[retrieves])
            requests = np.append(requests, np.full(int(retrieves.sum()), i))
        return HostRows(tokens, requests, lens)


def still_unknown(drafted: IntArray, begins: IntArray, prompt_lens: IntArray) -> IntArray:
    """(R,) tokens among those there at most that may have been rejected.

    All are generated ones. A request that a step passes over may have fewer of them by then than
    were drafted, and all are known.

    drafted: (R,) in the last step that each ran. begins: (R,) tokens at most. prompt_lens: (R,).
    """
    return np.minimum(drafted, np.maximum(begins - prompt_lens, 0))


def rows_of(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Of (R,) requests with so many rows: (N,) whose each is, and how many of its own follow."""
    requests = np.repeat(np.arange(len(counts)), counts)
    return requests, np.repeat(np.cumsum(counts), counts) - np.arange(len(requests)) - 1


def retrieving_lens(
    rules: Rules, costs: Costs, generates: np.ndarray, stored_lens: IntArray
) -> IntArray:
    """(S, R) entries that each request's last token sees, 0 where it does not retrieve.

    Those below their floors retrieve where it takes a layer less time than if they did not: what
    they save must be more than what retrieval costs at all, unless others retrieve anyway.

    Args:
        rules, costs: of the step's requests, and of a layer.
        generates: (R,) bool, requests that may retrieve.
        stored_lens: (S, R) entries seen by each request's last token.
    """
    alone = generates & (stored_lens >= rules.floors)
    if alone.all():  # Long contexts, of which it takes less time.
        return stored_lens.copy()
    near = generates & (stored_lens >= rules.least) & ~alone
    if near.any():
        gains = costs.gain(stored_lens, rules.budgets * rules.unit)
        near &= gains > 0
        saved = (gains * near).sum(axis=1)
        saved += np.where((alone | near).all(axis=1), costs.whole, 0)
        saved -= np.where(alone.any(axis=1), 0, costs.fixed)
        entries = (stored_lens * (alone | near)).sum(axis=1)
        # Where others retrieve by themselves, what was not measured is paid for anyway.
        near &= ((saved > 0) & (alone.any(axis=1) | (entries >= costs.least)))[:, None]
    return np.where(alone | near, stored_lens, 0)


def graph_modes(policies: Iterable[KVPolicy], stage_starts: Sequence[int]) -> tuple[Modes, ...]:
    """The CUDA graphs that a server captures: of no retrieval first, the last one fits any step.

    Without policies there is the first one alone, and steps that retrieve replay none.

    Those between are for long contexts: SPEED's upper layers hold too few entries to choose from.

    Args:
        policies: that may retrieve on the server; see ``KVSettings.may_retrieve``.
    """
    long = [
        tuple(
            Mode.DENSE if storage.gap_of(policy, 1 << 30, start).size else Mode.ALL
            for start in stage_starts
        )
        for policy in policies
    ]
    dense = (Mode.DENSE,) * len(stage_starts)
    if not long:
        return (dense,)
    return tuple(dict.fromkeys((dense, *long, (Mode.MIXED,) * len(stage_starts))))


@cache
def graph_for(graphs: tuple[Modes, ...], wanted: Modes) -> Modes:
    """The first of `graphs` that a step of modes `wanted` can replay."""
    return next(each for each in graphs if covers(each, wanted))


def covers(graph: Modes, wanted: Modes) -> bool:
    """Whether a step that wants `wanted` can replay a graph of modes `graph`."""
    return all(g is w or g is Mode.MIXED for g, w in zip(graph, wanted, strict=True))
