"""What runs beside a layer's attention: windows, choices, retention and retrieval."""

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from simulation.cache import Cache, Mismatch
from simulation.live import Expected, Ints, Live
from vllm_kvx.policy.axes import Positions
from vllm_kvx.worker.decode.sidecars import Sidecars
from vllm_kvx.worker.decode.step import RetrievalPass
from vllm_kvx.worker.layer_hooks import LayerHook
from vllm_kvx.worker.prefill.score_and_move import PassWork
from vllm_kvx.worker.prefill.scoring import KeyScoring, PassPrompt
from vllm_kvx.worker.waiting_queries import WaitingQueries

if TYPE_CHECKING:
    from simulation.model import Rows


@dataclass
class Seen:
    """By row of a pass: the entries that it may see, and whether attention or retrieval did."""

    lens: Ints
    attended: np.ndarray
    retrieved: np.ndarray

    @classmethod
    def of(cls, lens: Ints) -> "Seen":
        """Of a layer whose attention has not run yet."""
        return cls(lens, np.zeros(len(lens), dtype=bool), np.zeros(len(lens), dtype=bool))


class Centrality:
    """Stands for the worker's: tokens and blocks are drawn, and layers are told apart at random."""

    def __init__(self, live: dict[str, Live], block_size: int, rng: random.Random) -> None:
        """live: by request id."""
        self._live, self._block_size, self._rng = live, block_size, rng
        self._blocks: dict[str, dict[int, Tensor]] = {}
        self.metrics: dict[str, list[Tensor]] = {}

    def measure(self, req_id: str) -> None:
        """One layer's attention, for a prompt whose pivot is found meanwhile."""
        values = [self._rng.random() for _ in range(3)]
        self.metrics.setdefault(req_id, []).append(torch.tensor(values, dtype=torch.float64))

    def choose(self, req_id: str, num_keys: int, window: int, count: int) -> Tensor:
        """Which tokens go on, the window among them."""
        self.metrics.pop(req_id, None)
        chosen = sample(num_keys, count, window, self._rng)
        self._live[req_id].chosen = chosen
        return torch.from_numpy(chosen)

    def rank(self, prompt: PassPrompt) -> None:
        """Which blocks stay; the last one does, and it alone may be partly filled."""
        live = self._live[prompt.req_id]
        kept: dict[int, Tensor] = {}
        for stage, (entries, holds_all) in enumerate(prompt.blocks):
            if entries:
                held = prompt.num_keys if holds_all or live.chosen is None else len(live.chosen)
                blocks, stay = -(-held // self._block_size), -(-entries // self._block_size)
                kept[stage] = torch.from_numpy(sample(blocks, stay, 1, self._rng))
        self._blocks[prompt.req_id] = kept

    def take_blocks(self) -> dict[str, dict[int, Tensor]]:
        """As the worker's own."""
        blocks, self._blocks = self._blocks, {}
        return blocks


def sample(total: int, count: int, last: int, rng: random.Random) -> Ints:
    """`count` of `total` in order, the `last` ones among them."""
    last = min(last, count)
    chosen = sorted(rng.sample(range(total - last), count - last))
    return np.array([*chosen, *range(total - last, total)], dtype=np.int64)


class Beside:
    """What the layers do besides, on a server's cache. `expected` changes with it."""

    def __init__(
        self,
        live: dict[int, Live],
        cache: Cache,
        expected: Expected,
        centrality: Centrality,
        sidecars: Sidecars | None,
        rng: random.Random,
        counts: Counter[str],
    ) -> None:
        """live: by request state. counts: how often what happened."""
        self.counts = counts
        self.live, self.cache, self.expected = live, cache, expected
        self.centrality, self.sidecars, self._rng = centrality, sidecars, rng
        # What goes once the layer that is split has run: by its work and layer.
        self._waiting: dict[tuple[PassWork, int], list[tuple[Live, Ints, Ints]]] = {}

    def check_done(self) -> None:
        """After a forward pass.

        Raises:
            Mismatch: what scores dropped is still there.
        """
        if self._waiting:
            raise Mismatch(f"entries still to be dropped: {list(self._waiting.values())}")

    # Prompts.

    def run(
        self, work: PassWork | WaitingQueries, hook: LayerHook, rows: "Rows", requests: Ints
    ) -> None:
        """Windows are kept; the keys of prompts that are in decide which tokens and entries stay.

        requests: (R,) states of the batch's requests.
        """
        layer = hook.number
        if isinstance(work, WaitingQueries):
            self._keep(work, layer, rows)
            return
        if work.earlier is not None:
            for each in self._waiting.pop((work.earlier, layer), ()):
                self._retain(each[0], layer, *each[1:])
        if work.windows is not None:
            columns = (work.windows.rows, work.windows.slots, work.windows.places)
            for row, slot, place in zip(*(column.tolist() for column in columns), strict=True):
                self._keep_one(layer, rows, row, slot, place)
        tables = work.targets(hook.group).tables.numpy().astype(np.int64)
        for prompt in (each.in_stage(hook.stage) for each in work.prompts):
            jobs = prompt.scorings(layer, hook.stage)
            kept = self._kept(prompt, hook.stage, jobs)
            if not jobs and kept is None:
                continue
            here = self.live[int(requests[prompt.batch_index])]
            held = self.expected.lens[layer, here.index]
            if here.req_id != prompt.req_id or prompt.num_keys != held:
                raise Mismatch(f"{here}, layer {layer}: scores {prompt.num_keys} of {held} keys")
            for job in jobs:
                self._score(work, job, layer, rows, here)
            if kept is None:
                continue
            table = tables[prompt.batch_index]
            if work.waits:
                self._waiting.setdefault((work, layer), []).append((here, table, kept))
            else:
                self._retain(here, layer, table, kept)

    def _keep(self, work: WaitingQueries, layer: int, rows: "Rows") -> None:
        """What a graph keeps: of every row, those that nobody reads among them."""
        slots, places = (column.tolist() for column in work.at)
        for row in range(len(rows.positions)):
            if slots[row] != work.spare_slot:
                self.counts["kept by graphs"] += layer == 0
                self._keep_one(layer, rows, row, slots[row], places[row])

    def _keep_one(self, layer: int, rows: "Rows", row: int, slot: int, place: int) -> None:
        kept = self.live[int(rows.requests[row])].queries.setdefault((slot, layer), {})
        kept[place] = int(rows.positions[row])

    def _kept(self, prompt: PassPrompt, stage: int, jobs: list[KeyScoring]) -> Ints | None:
        """Which entries stay; None if all do."""
        num_keys, by, count = prompt.num_keys, prompt.by, prompt.kept[stage]
        drafted = prompt.drafted
        for job in jobs:
            if job.kept < num_keys:
                sizes = num_keys - drafted, job.kept - drafted, job.window - drafted
                return sample(*sizes, self._rng)
        if drafted:
            return np.arange(num_keys - drafted)
        if not isinstance(by, Positions) or count == num_keys:
            return None
        recent = np.arange(num_keys - (count - by.sinks), num_keys)
        return np.concatenate([np.arange(by.sinks), recent])

    def _score(self, work: PassWork, job: KeyScoring, layer: int, rows: "Rows", live: Live) -> None:
        prompt = job.prompt
        if job.window:
            self._check_window(job, layer, rows, live)
        if job.measures:
            self.centrality.measure(prompt.req_id)
        if job.selects:
            last = max(job.window, job.last)  # Windows of layers above may be longer.
            chosen = self.centrality.choose(prompt.req_id, prompt.num_keys, last, job.selects)
            work.chosen[prompt.req_id] = chosen.int()
        if job.ranks:
            self.centrality.rank(prompt)

    def _check_window(self, job: KeyScoring, layer: int, rows: "Rows", live: Live) -> None:
        """The queries that score are those of the last tokens that retention waits for.

        Tokens that go on are chosen before: by those of the prompt.
        """
        prompt = job.prompt
        if prompt.slot is None:
            last = prompt.first_row + prompt.longest
            positions = rows.positions[last - job.window : last].tolist()
        else:
            self.counts["split windows"] += layer == 0
            kept = live.queries.get((prompt.slot, layer), {})
            positions = [kept.get(place) for place in range(job.window)]
        chooses = live.selection is not None and live.chosen is None
        end = live.prompt_len + (0 if chooses else live.policy.num_generated) + prompt.drafted
        if positions != list(range(end - job.window, end)):
            raise Mismatch(f"{live}, layer {layer}: a window at {positions} of {end}")

    def _retain(self, live: Live, layer: int, table: Ints, kept: Ints) -> None:
        """Drops all entries but `kept`, which come to the front."""
        entries = self.expected.of(layer, live.index)[kept]
        self.cache.write(layer, self.cache.slots_of(table, np.arange(len(kept))), entries)
        self.expected.put(layer, live.index, entries)
        self.counts["compacted"] += 1

    # Retrieval.

    def retrieve(
        self,
        now: RetrievalPass,
        hook: LayerHook,
        rows: "Rows",
        requests: Ints,
        seen: Seen,
    ) -> None:
        """The rows that retrieve: each sees all its entries through an index that is up to date."""
        assert self.sidecars is not None
        if now.full_groups is not None:
            self.sidecars.write_groups(now.full_groups, hook.place)
        elif now.writes:
            self.sidecars.write(hook.place)
        tables = now.block_tables[hook.group].numpy().astype(np.int64)
        for batch in now.rows_of(hook):
            columns = (batch.lens, batch.tokens, batch.requests)
            for length, row, place in zip(*(column.tolist() for column in columns), strict=True):
                if not length:
                    continue
                here = self.live[int(requests[place])]
                if rows.requests[row] != here.index or length != seen.lens[row]:
                    raise Mismatch(
                        f"{here}: row {row} is {rows.requests[row]}'s and may see "
                        f"{seen.lens[row]} entries, and retrieves from {length}"
                    )
                self._check_retrieved(here, hook.index, tables[place], length)
                seen.retrieved[row] = True
                self.counts["retrieved"] += 1

    def _check_retrieved(self, live: Live, layer: int, table: Ints, length: int) -> None:
        entries, size = self.expected.of(layer, live.index)[:length], self.cache.group
        if (self.cache.read(layer, table, np.arange(length)) != entries).any():
            raise Mismatch(f"{live}, layer {layer}: retrieves from others' entries")
        groups = (length - 1) // size  # The newest is read whole.
        held = self.cache.read_sidecar(layer, table, groups)
        stale = np.flatnonzero(held != self.cache.checksums(entries[: groups * size]))
        if len(stale):
            raise Mismatch(
                f"{live}, layer {layer}: groups {stale.tolist()} of {groups} were not quantised "
                "from what they hold"
            )
