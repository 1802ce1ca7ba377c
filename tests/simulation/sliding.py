"""Layers that slide among those that policies propagate past: what each step has to show them.

A token exists in such a layer if it runs it, and a row sees the tokens that exist within its
window, which is one of positions. Where tokens go on by position, those that stay behind the cut
and the prompt's tail are no neighbours: from the tail on a row sees nothing before it. Where tokens
are selected, the last ones go on whatever their score, as many as a window has. Of what layers
hold only what stock attention reads counts: the last entries, as many as a window has, up to the
row's own.

This is the definition. Of the project it takes methods' names and numbers, and what a method that
selects would choose without windows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from simulation.cache import Cache, Mismatch
from simulation.live import Ints, Live, Made
from simulation.other_layers import WindowLayer
from simulation.state import Metadata
from vllm_kvx.ops.prompt.sliding_rows import SlidingRows
from vllm_kvx.policy.methods.speed import Speed

if TYPE_CHECKING:
    from simulation.model import Rows


class SlidingLayers:
    """These layers, over the cache that all groups have their blocks in.

    layers, groups: by their numbers in the decoder, and the KV group of each.
    """

    def __init__(
        self,
        layers: Mapping[int, WindowLayer],
        groups: Mapping[int, int],
        live: dict[int, Live],
        cache: Cache,
        counts: Counter[str],
        max_reqs: int,
        max_len: int,
    ) -> None:
        """live: by request state."""
        self.layers, self.groups, self._live = layers, groups, live
        self._cache, self._counts = cache, counts
        shape = (max_reqs, max_len + 1)
        # By layer and request state: which positions exist, and what was made of them.
        self._there = {number: np.zeros(shape, dtype=bool) for number in layers}
        self._entries = {number: np.zeros(shape, dtype=np.int64) for number in layers}

    def add(self, one: Live, starts: Sequence[int]) -> None:
        """A request begins, perhaps with a prefix that others computed: as if it had done so.

        starts: by layer of the decoder, the first one of its KV stage.

        Raises:
            Mismatch: other tokens are to go on than windows need.
        """
        self.start_over(one.index)
        if not self.layers:
            return
        num_layers, at = len(starts), np.arange(one.done)
        made = Made(self._live, np.full(one.done, one.index), at, False, True)
        for number in self.layers:
            self._there[number][one.index, at] = runs(one, at, number)
            self._entries[number][one.index, at] = made.in_layer(number, starts[number])[0]
        found = one.selection and (one.selection.count, one.selection.last)
        if found != (wanted := self._selected(one, num_layers)):
            raise Mismatch(f"{one}: {found} tokens go on, and the last of them; want {wanted}")

    def start_over(self, request: int) -> None:
        """Its prompt runs again: of what ran nothing counts."""
        for there in self._there.values():
            there[request] = False

    def reject(self, one: Live) -> None:
        """Tokens behind those that are computed were drafted, and do not stay."""
        for there in self._there.values():
            there[one.index, one.done :] = False

    def check(self, one: Live) -> None:
        """After a step.

        Raises:
            Mismatch: other tokens exist than should.
        """
        at = np.arange(one.done)
        for number, there in self._there.items():
            wanted = runs(one, at, number)
            if (there[one.index, : one.done] != wanted).any():
                wrong = at[there[one.index, : one.done] != wanted].tolist()
                raise Mismatch(f"{one}, layer {number}: ran or not, against its policy: {wrong}")

    def run(
        self,
        number: int,
        rows: "Rows",
        entries: Ints,
        metadata: Metadata | SlidingRows,
        slots: Ints,
    ) -> None:
        """A layer in one pass.

        Raises:
            Mismatch: a row sees other tokens than those that exist in its window.
        """
        if isinstance(metadata, SlidingRows):
            self._run_chosen(number, rows, entries, metadata, slots)
            return
        owners = np.repeat(metadata.requests, np.diff(metadata.starts))
        if (owners != rows.requests).any():
            raise Mismatch(f"layer {number}: rows of {rows.requests}, want {owners}")
        if metadata.is_stale:
            raise Mismatch(f"layer {number}: attention runs by the plan of a later batch")
        stored = slots != PAD_SLOT_ID
        self._disjoint(number, owners[stored], slots[stored])
        self._cache.write(number, slots[stored], entries[stored])
        pieces = zip(metadata.starts[:-1].tolist(), metadata.starts[1:].tolist(), strict=True)
        for (begin, end), length, table in zip(pieces, metadata.lens, metadata.table, strict=True):
            one, at = self._live[int(owners[begin])], rows.positions[begin:end]
            exists = runs(one, at, number)
            if (stored[begin:end] != exists).any():
                raise Mismatch(f"{one}, layer {number}: stored or not, against its policy: {at}")
            if not exists.any():
                continue  # A graph ran it along, for nothing.
            self._put(number, one, at, entries[begin:end])
            there = self._seen_by(number, one, at)
            first, last = np.searchsorted(there, [at[0] - self.layers[number].window + 1, at[-1]])
            # What stock attention takes for its window: so many entries up to the row's own.
            ranks, own = np.searchsorted(there, at), np.arange(length - len(at), length)
            lows = np.searchsorted(there, at - self.layers[number].window + 1)
            widths = np.minimum(own + 1, self.layers[number].window)
            held = self._cache.read(number, table, np.arange(first, last + 1) + own[0] - ranks[0])
            wanted = self._entries[number][one.index, there[first : last + 1]]
            if (ranks - lows + 1 != widths).any() or (held != wanted).any():
                raise Mismatch(
                    f"{one}, layer {number}: rows at {at} see {widths} entries, want "
                    f"{ranks - lows + 1}; others' at {there[first : last + 1][held != wanted]}"
                )
            self._counts["windows"] += int((lows > 0).sum())

    def _run_chosen(
        self, number: int, rows: "Rows", entries: Ints, metadata: SlidingRows, slots: Ints
    ) -> None:
        """Chosen tokens, which see one another alone; some of them are stored."""
        window, name = self.layers[number].window, self.layers[number].layer_name
        made = torch.from_numpy(entries)[:, None, None]
        every = metadata.entries(name, made, made)[0][:, 0, 0].numpy()
        seen = metadata.within(window)
        assert seen.firsts is not None
        stored = slots != PAD_SLOT_ID
        self._disjoint(number, rows.requests[stored], slots[stored])
        self._cache.write(number, slots[stored], entries[stored])
        ends = np.cumsum(seen.counts)
        if ends[-1] != len(entries):
            raise Mismatch(f"layer {number}: {len(entries)} rows, of which {ends[-1]} attend")
        for end, count, table in zip(ends, seen.counts, seen.block_tables.numpy(), strict=True):
            one, span = self._live[int(rows.requests[end - 1])], slice(end - count, end)
            at, ours = rows.positions[span], rows.requests[span] == rows.requests[end - 1]
            if not ours.all() or not runs(one, at, number).all():
                raise Mismatch(f"{one}, layer {number}: {at} are not its chosen tokens")
            needed, settled = at > one.prompt_len - window, one.prompt_len - self.last(one)
            if (needed & ~stored[span]).any() or stored[span][at < settled].any():
                raise Mismatch(f"{one}, layer {number}: stores {at[stored[span]]}")
            self._put(number, one, at, entries[span])
            there = self._seen_by(number, one, at)
            first, last = seen.firsts[span].numpy(), seen.positions[span].numpy()
            lows, ranks = np.searchsorted(there, at - window + 1), np.searchsorted(there, at)
            held = every[table[first[0] : last[-1] + 1]]
            wanted = self._entries[number][one.index, there[lows[0] : ranks[-1] + 1]]
            is_whole = (last - first == ranks - lows).all() and (np.diff(last) == 1).all()
            if not is_whole or len(held) != len(wanted) or (held != wanted).any():
                raise Mismatch(
                    f"{one}, layer {number}: of {there} rows at {at} see {last - first + 1}, want "
                    f"{ranks - lows + 1}"
                )
            self._counts["windows of chosen tokens"] += len(at)

    def _put(self, number: int, one: Live, at: Ints, entries: Ints) -> None:
        self._there[number][one.index, at] = True
        self._entries[number][one.index, at] = entries

    def _seen_by(self, number: int, one: Live, at: Ints) -> Ints:
        """The positions that exist for rows at `at`, but for windows."""
        there = np.flatnonzero(self._there[number][one.index])
        speed = one.policy.propagate
        if isinstance(speed, Speed) and number >= speed.cutoff:
            tail = one.prompt_len - speed.tail
            if at[0] < tail <= at[-1]:
                raise Mismatch(f"{one}, layer {number}: anchors and tail are in one pass: {at}")
            return there[there >= tail] if at[0] >= tail else there
        return there

    def _disjoint(self, number: int, owners: Ints, slots: Ints) -> None:
        """Requests write blocks of their own."""
        pairs = np.unique(np.stack([slots // self._cache.block_size, owners]), axis=1)
        if len(np.unique(pairs[0])) < pairs.shape[1]:
            raise Mismatch(f"layer {number}: requests write the same blocks, {pairs}")

    def last(self, one: Live) -> int:
        """The last prompt tokens, which go on whatever their score."""
        assert one.selection is not None
        window = max(layer.window for layer in self.layers.values())
        return max(one.selection.score.window, window)

    def _selected(self, one: Live, num_layers: int) -> tuple[int, int] | None:
        """How many tokens go on, and the last ones that do whatever their score; None for all."""
        propagate = one.policy.propagate
        plain = propagate and propagate.selection(one.prompt_len, num_layers)
        if not plain:
            return None
        least, window = plain.score.window, max(layer.window for layer in self.layers.values())
        last = max(least, window if max(self.layers) >= plain.resumes_at else 0)
        count = plain.count - least + last
        return (count, last) if count < one.prompt_len else None


def runs(one: Live, at: Ints, layer: int) -> np.ndarray:
    """(n,) bool: whether tokens at these positions run the layer, as far as it is known by now."""
    propagate, selection = one.policy.propagate, one.selection
    if isinstance(propagate, Speed):
        is_end = (at < propagate.anchors) | (at >= one.prompt_len - propagate.tail)
        return is_end | (layer < propagate.cutoff)
    if selection is None or (one.chosen is None and layer <= selection.after):
        return np.ones(len(at), dtype=bool)
    if layer < selection.resumes_at:
        return np.ones(len(at), dtype=bool)
    chosen = one.chosen if one.chosen is not None else ()
    return (at >= one.prompt_len) | np.isin(at, chosen)
