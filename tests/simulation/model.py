"""The model: it runs the passes that the worker plans, on which tokens there are instead of states.

A row of a pass is a token of a request. Every layer writes the rows' entries, checks that each row
sees the entries that it should, and then does what the worker wants beside its attention: keep the
window's queries, choose tokens, drop entries. Which ones is drawn at random, where the real model
would have scores.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from simulation.adapters import RowAdapters
from simulation.beside import Beside, Seen
from simulation.cache import Cache, Mismatch
from simulation.live import Expected, Ints, Live, Made
from simulation.other_layers import OtherLayers
from simulation.sliding import SlidingLayers
from simulation.state import Metadata
from vllm_kvx.models.passes import (
    BatchRows,
    Pass,
    Previous,
    Queries,
    Stashed,
    StepPlan,
    ToEntries,
    TokenIds,
    ToOutput,
    ToStash,
)
from vllm_kvx.ops.prompt.chosen_rows import ChosenRows
from vllm_kvx.worker.decode.step import Mode, RetrievalPass
from vllm_kvx.worker.layer_hooks import LayerHook, LayerHooks


@dataclass
class Batch:
    """A step, as the forward pass sees it.

    Attributes:
        requests: (R,) request states. starts: (R + 1,) first row of each.
        sampled: (R,) how many of the last rows have logits: one and those of its drafts.
        positions, ids: (T,).
        metadata: by layer name. slots: (G, T), by KV group.
    """

    requests: Ints
    starts: Ints
    sampled: Ints
    positions: Ints
    ids: Ints
    metadata: dict[str, Metadata]
    slots: Ints


@dataclass(frozen=True)
class Rows:
    """Tokens on their way through the layers: request states and positions, (N,)."""

    requests: Ints
    positions: Ints

    def __getitem__(self, rows: Any) -> "Rows":
        return Rows(self.requests[rows], self.positions[rows])


class Model:
    """Runs the steps.

    row_layers: layers that rows have run so far, over all rows. final: by row of the last step, the
    token whose state is put out; -1 where none is.
    """

    def __init__(
        self,
        hooks: LayerHooks,
        beside: Beside,
        cache: Cache,
        expected: Expected,
        live: dict[int, Live],
        starts: list[int],
        splits: frozenset[int],
        others: OtherLayers,
        sliding: SlidingLayers,
        adapters: RowAdapters,
    ) -> None:
        """live: by request state. starts: by layer, the first one of its KV stage.

        splits: the layers that are split: see ``worker/split_layers``.
        others: the layers that follow no policy; half of them run before all that do.
        sliding: those that slide among them.
        adapters: which one every row has.
        """
        self._adapters = adapters
        self._others, self._sliding = others, sliding
        self.splits = splits
        # By layer that is split: the request states whose entries this step projects in it.
        self._projected: dict[int, set[int]] = {}
        self.hooks, self.beside = hooks, beside
        self.cache, self.expected, self.live, self.starts = cache, expected, live, starts
        self.row_layers = 0
        # By row of the stash: what its state is made of, of which position, before which layer.
        self.stashed: dict[int, tuple[int, int, int]] = {}

    def run(self, plan: StepPlan, batch: Batch) -> np.ndarray:
        """One forward pass; (R,) bool: whether a request's sampled rows have a final state.

        Raises:
            Mismatch: a row sees, or a state was, anything but what it has to be.
        """
        self._projected = {layer: set() for layer in self.splits}
        self._others.run(batch, slice(None, None, 2))
        self._adapters.follow(plan.adapters, plan.passes is not None)
        passes: Iterable[Pass] | None = plan.passes
        if passes is None:
            first = self.hooks.first
            last = first + len(self.hooks.names)
            passes = [Pass(first, last, BatchRows(), [ToOutput()], hooks=plan.hooks)]
        rows: Rows | None = None
        final = Rows(np.full(len(batch.ids), -1), np.full(len(batch.ids), -1))
        for now in passes:
            self._adapters.select(now.requests)
            with now.hooks:
                rows = self._run_pass(batch, now, rows)
            self._write(batch, now, rows, final)
        self.final = final
        self._adapters.end_step()
        self._others.run(batch, slice(1, None, 2))
        self.beside.check_done()
        owners = np.repeat(batch.requests, np.diff(batch.starts))
        is_final = (final.requests == owners) & (final.positions == batch.positions)
        ends = zip(batch.starts[1:].tolist(), batch.sampled.tolist(), strict=True)
        return np.array([is_final[end - sampled : end].all() for end, sampled in ends])

    # A pass.

    def _run_pass(self, batch: Batch, now: Pass, before: Rows | None) -> Rows:
        rows = self._source(batch, now, before)
        self._adapters.check(rows.requests)
        at = batch.positions if now.positions is None else now.positions.numpy()
        if (at != rows.positions).any():
            raise Mismatch(f"layers {now.first} to {now.last}: rows at {at}, want {rows.positions}")
        is_again, is_batch = (
            isinstance(now.source, kind) for kind in (TokenIds, BatchRows | Previous)
        )
        if is_again:
            self._start_over(rows)
        made = Made(self.live, rows.requests, rows.positions, is_again, is_batch)
        for number in range(now.first, now.last):
            if number in self._sliding.layers:
                self._slide(batch, now, made, rows, number)
            else:
                self._run_layer(batch, now, made, rows, self.hooks.by_number[number])
        self.row_layers += len(at) * (now.last - now.first)
        return rows

    def _source(self, batch: Batch, now: Pass, before: Rows | None) -> Rows:
        source = now.source
        if isinstance(source, BatchRows):
            owners = np.repeat(batch.requests, np.diff(batch.starts))
            rows = Rows(owners, batch.positions)
            return rows if source.rows is None else rows[source.rows.numpy()]
        if isinstance(source, Previous):
            assert before is not None
            return before if source.rows is None else before[source.rows.numpy()]
        # Those that slide are not told of chosen tokens' owners.
        above = (number for number in self.hooks.by_number if number >= now.first)
        owners = self._owners(batch, now, min(above))
        if isinstance(source, TokenIds):
            assert now.positions is not None
            rows = Rows(owners, now.positions.numpy())
            where = zip(owners.tolist(), rows.positions.tolist(), strict=True)
            tokens = [self.live[request].tokens[at] for request, at in where]
            if source.ids.tolist() != tokens:
                raise Mismatch(f"token ids {source.ids.tolist()}, want {tokens}")
            return rows
        assert isinstance(source, Stashed)
        states = [self.stashed[row] for row in source.rows.tolist()]
        for request, (made_of, position, layer) in zip(owners.tolist(), states, strict=True):
            one = self.live[request]
            if made_of != one.state_at(position) or layer != now.first:
                raise Mismatch(f"{one}: its stash holds others' states at {position}, of {layer}")
        return Rows(owners, np.array([position for _, position, _ in states]))

    def _start_over(self, rows: Rows) -> None:
        """What the layers hold of a prompt is replaced from its first chosen token on."""
        for request in np.unique(rows.requests).tolist():
            chosen = self.live[request].chosen
            at = rows.positions[rows.requests == request]
            if chosen is not None and at[0] == chosen[0]:
                self.expected.lens[:, request] = 0
                self._sliding.start_over(request)

    def _write(self, batch: Batch, now: Pass, rows: Rows, final: Rows) -> None:
        for sink in now.sinks:
            if isinstance(sink, ToEntries):
                self._project(sink, now.last, rows[sink.rows.numpy()])
                if sink.queries is not None:
                    self._ask(batch, sink.first, rows, sink.queries)
                continue
            out = rows if sink.rows is None else rows[sink.rows.numpy()]
            if isinstance(sink, ToStash):
                columns = (sink.targets.tolist(), out.requests.tolist(), out.positions.tolist())
                for row, request, at in zip(*columns, strict=True):
                    self.stashed[row] = self.live[request].state_at(at), at, now.last
                continue
            in_batch = slice(None) if sink.in_batch is None else sink.in_batch.numpy()
            final.requests[in_batch], final.positions[in_batch] = out.requests, out.positions

    def _project(self, sink: ToEntries, layer: int, rows: Rows) -> None:
        """Entries of layers that these rows do not run, made of their states before `layer`."""
        if (sink.positions.numpy() != rows.positions).any() or sink.first != layer:
            raise Mismatch(f"projects {sink.positions} from layer {layer}, has {rows.positions}")
        is_split = layer in self.splits and sink.last == layer + 1
        for request, at in zip(rows.requests.tolist(), rows.positions.tolist(), strict=True):
            one = self.live[request]
            above = one.policy.projects_from == layer and at < one.prompt_len
            if not (above or (is_split and not one.storages[layer].prefill.size)):
                raise Mismatch(f"{one}: {at} is projected from layer {layer} on")
        if is_split:
            requests = set(rows.requests.tolist())
            if requests & self._projected[layer]:
                raise Mismatch(f"{requests} are projected twice in layer {layer}")
            self._projected[layer] |= requests
        self._adapters.select(sink.requests)
        self._adapters.check(rows.requests)
        made = Made(self.live, rows.requests, rows.positions, False, False)
        for number in range(sink.first, sink.last):
            entries, _ = made.in_layer(number, self.starts[number])
            slots = sink.slot_mapping[self.hooks.names[number - self.hooks.first]].numpy()
            self.cache.write(number, slots, entries)
            self.expected.append(number, rows.requests, entries)

    def _ask(self, batch: Batch, layer: int, rows: Rows, queries: Queries) -> None:
        """What the worker does beside a layer that these rows do not run."""
        asked = rows[queries.rows.numpy()]
        self._adapters.select(queries.requests)
        self._adapters.check(asked.requests)
        if (asked.positions != queries.positions.numpy()).any():
            raise Mismatch(f"layer {layer}: queries of {asked.positions}, not {queries.positions}")
        with queries.hooks:
            assert self.hooks.work is not None
            self.beside.run(self.hooks.work, self.hooks.by_number[layer], asked, batch.requests)

    def _owners(self, batch: Batch, now: Pass, layer: int) -> Ints:
        """(N,) request states of a pass's rows, as the layer's attention is told."""
        metadata = self._metadata(batch, now, layer)
        if isinstance(metadata, ChosenRows):
            return np.repeat(batch.requests[metadata.requests], metadata.counts)
        return np.repeat(metadata.requests, np.diff(metadata.starts))

    def _metadata(self, batch: Batch, now: Pass, layer: int) -> Metadata | ChosenRows:
        by_name = batch.metadata if now.attn_metadata is None else now.attn_metadata
        return by_name[self.hooks.names[layer - self.hooks.first]]

    # A layer.

    def _slide(self, batch: Batch, now: Pass, made: Made, rows: Rows, number: int) -> None:
        entries, _ = made.in_layer(number, self.starts[number])
        slots = now.slot_mapping.get(self.hooks.names[number - self.hooks.first])
        where = batch.slots[self._sliding.groups[number]] if slots is None else slots.numpy()
        metadata: Any = self._metadata(batch, now, number)
        self._sliding.run(number, rows, entries, metadata, where)

    def _run_layer(self, batch: Batch, now: Pass, made: Made, rows: Rows, hook: LayerHook) -> None:
        layer, metadata = hook.number, self._metadata(batch, now, hook.number)
        if (rows.requests != self._owners(batch, now, layer)).any():
            raise Mismatch(f"layer {layer}: rows of {rows.requests}, want {metadata.requests}")
        if isinstance(metadata, ChosenRows):
            self._attend_chosen(now, metadata, rows, hook)
            if self.hooks.work is not None:
                self.beside.run(self.hooks.work, hook, rows, batch.requests)
            return
        counts = np.diff(metadata.starts)
        self._store(batch, now, made, hook)
        lens = self.expected.lens[layer, metadata.requests]
        projected = self._projected_of(now, layer)
        if projected:
            # Rows at both ends of a sequence all of which is stored.
            last = rows.positions[metadata.starts[1:] - 1]
            lens = np.where(np.isin(metadata.requests, projected), last + 1, lens)
        # Every row sees those of its request up to its own, which is stored in order.
        after = np.repeat(metadata.starts[1:], counts) - np.arange(len(rows.requests)) - 1
        seen = Seen.of(np.repeat(lens, counts) - after)
        if ((seen.lens < 1) & (np.repeat(counts, counts) > 1)).any():
            raise Mismatch(f"layer {layer}: rows {rows.positions} are more than the entries {lens}")
        retrieval = self.hooks.retrieval_pass if hook.retrieves else None
        mode = Mode.DENSE if retrieval is None else retrieval.modes[hook.stage]
        if mode is not Mode.ALL:
            attends = self._attend(layer, metadata, lens, mode)
            seen.attended[:] = np.repeat(attends, counts)
        if mode is not Mode.DENSE:
            assert isinstance(retrieval, RetrievalPass)
            self.beside.retrieve(retrieval, hook, rows, batch.requests, seen)
        if self.hooks.work is not None:
            self.beside.run(self.hooks.work, hook, rows, batch.requests)
        wanted = (seen.lens >= made.floors) & (layer >= made.dense)
        wrong = (seen.retrieved != wanted) | ~(seen.attended | wanted)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise Mismatch(
                f"{self.live[int(rows.requests[row])]} at {rows.positions[row]}, layer {layer}: "
                f"attended {seen.attended[row]}, retrieved {seen.retrieved[row]}"
            )

    def _store(self, batch: Batch, now: Pass, made: Made, hook: LayerHook) -> None:
        layer, slots = hook.number, now.slot_mapping.get(hook.layer.layer_name)
        where = batch.slots[hook.group] if slots is None else slots.numpy()
        entries, stored = made.in_layer(layer, self.starts[layer])
        stored = stored & ~np.isin(made.requests, self._projected_of(now, layer))
        wrong = (where != PAD_SLOT_ID) != stored
        if wrong.any():
            one, at = self.live[int(made.requests[wrong][0])], made.positions[wrong]
            raise Mismatch(f"{one}, layer {layer}: stored or not, against its policy, are {at}")
        self.cache.write(layer, where[stored], entries[stored])
        made.take_over(layer, self.expected)
        self.expected.append(layer, made.requests[stored], entries[stored])

    def _projected_of(self, now: Pass, layer: int) -> list[int]:
        """Request states whose entries the layer has already when a pass over the batch runs it."""
        is_batch = isinstance(now.source, BatchRows | Previous)
        return list(self._projected.get(layer, ())) if is_batch else []

    def _attend_chosen(self, now: Pass, chosen: ChosenRows, rows: Rows, hook: LayerHook) -> None:
        """Chosen tokens see all up to their own, and store nothing."""
        layer, slots = hook.number, now.slot_mapping[hook.layer.layer_name].numpy()
        if (slots != PAD_SLOT_ID).any() or (chosen.positions.numpy() != rows.positions).any():
            raise Mismatch(f"layer {layer}: stores {slots}, at {chosen.positions}")
        ends = np.cumsum(chosen.counts)
        for end, table in zip(ends.tolist(), chosen.block_tables.numpy(), strict=True):
            one = self.live[int(rows.requests[end - 1])]
            entries = self.expected.of(layer, one.index)
            held = self.cache.read(layer, table.astype(np.int64), np.arange(len(entries)))
            if len(entries) != one.prompt_len or (held != entries).any():
                raise Mismatch(f"{one}, layer {layer}: chosen tokens see others' entries")

    def _attend(self, layer: int, metadata: Metadata, lens: Ints, mode: Mode) -> np.ndarray:
        """Stock attention; (P,) bool: whether a request's rows saw all that they may see.

        Cut to one entry each, they did not: retrieval overwrites what comes of it.
        """
        if metadata.is_stale:
            raise Mismatch(f"layer {layer}: attention runs by the plan of a later batch")
        is_whole = metadata.lens == lens
        is_cut = (metadata.lens == np.diff(metadata.starts)) & (mode is Mode.MIXED)
        places = np.arange(metadata.lens.max())
        held = self.cache.read(layer, metadata.table, places)
        expected = self.expected.entries[layer, metadata.requests, : len(places)]
        wrong = (held != expected) & (places < lens[:, None]) & is_whole[:, None]
        if wrong.any() or not (is_whole | is_cut).all():
            i = int(np.flatnonzero(wrong.any(axis=1) | ~(is_whole | is_cut))[0])
            raise Mismatch(
                f"{self.live[int(metadata.requests[i])]}, layer {layer}: it sees "
                f"{metadata.lens[i]} entries of {lens[i]}; others' at {np.flatnonzero(wrong[i])}"
            )
        return is_whole
