"""The KV cache: what every slot of every layer holds, and what the sidecars were made of."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from simulation.live import Ints

# Of a token: what its hidden state is made of, its position, and before which layer.
State = tuple[int, int, int]


class Mismatch(Exception):
    """Something is not as it has to be; the message says what, of which request and where."""


class Cache:
    """Slots and sidecars by layer. Block 0 is vLLM's null block: nobody may touch it.

    A group of entries in a sidecar is the checksum of the entries that it was made of.
    """

    def __init__(
        self,
        places: Mapping[int, int],
        num_blocks: int,
        block_size: int,
        group: int,
        copies_pages: bool,
    ) -> None:
        """places: by layer, in its KV group: those of one place in all groups share memory.

        group: entries of a sidecar's group; 0 without sidecars.
        copies_pages: a copy takes the sidecar along, as vLLM's does of whole pages.
        """
        self._copies_pages, self._places_of = copies_pages, places
        self.block_size, self.group = block_size, group
        memories = max(places.values()) + 1
        self._slots = np.zeros((memories, num_blocks * block_size), dtype=np.int64)
        groups = num_blocks * block_size // group if group else 0
        self._sidecars = np.zeros((memories, groups), dtype=np.int64)
        self._kept: list[list[State]] = []
        self._weights = np.arange(1, 2 * group, 2, dtype=np.int64)

    def write(self, layer: int, slots: Ints, entries: Ints) -> None:
        if len(slots) and slots.min() < self.block_size:
            raise Mismatch(f"layer {layer} writes to a block that nobody holds")
        self._slots[self._places_of[layer], slots] = entries

    def read(self, layer: int, table: Ints, places: Ints) -> Ints:
        """(..., n) what is at these places, (n,), of requests with block tables (..., B)."""
        return self._slots[self._places_of[layer], self.slots_of(table, places)]

    def slots_of(self, table: Ints, places: Ints) -> Ints:
        """The slots of requests' entries, counted in their order."""
        block = table[..., places // self.block_size]
        return block * self.block_size + places % self.block_size

    def copy(self, source: int, target: int) -> None:
        """A block in all layers."""
        _copy(self._slots, source, target, self.block_size)
        if self._copies_pages:
            _copy(self._sidecars, source, target, self.num_groups)

    # What a KV connector copies: keys and values, without their sidecar.

    def entries_in(self, block: int) -> Ints:
        """(memories, B) what all layers of a block's KV group have in it."""
        return self._slots[:, self._slots_in(block)].copy()

    def put_entries(self, block: int, entries: Ints) -> None:
        """entries: of `entries_in`, which may be another server's."""
        if block == 0:
            raise Mismatch("entries are loaded into a block that nobody holds")
        self._slots[:, self._slots_in(block)] = entries

    # Hidden states, for which all layers' pages of a block are used.

    def keep_states(self, block: int, states: list[State]) -> None:
        """Writes over the block in all layers."""
        self._kept.append(states)
        self.write_block(block, -len(self._kept))

    def states(self, block: int) -> list[State]:
        """What `keep_states` wrote, if nothing was written since."""
        held = np.unique(self._slots[:, self._slots_in(block)])
        if len(held) > 1 or not -len(self._kept) <= held[0] < 0:
            raise Mismatch(f"block {block} has no states: it was written over")
        return self._kept[-held[0] - 1]

    def write_block(self, block: int, entry: int) -> None:
        if block == 0:
            raise Mismatch("hidden states go to a block that nobody holds")
        self._slots[:, self._slots_in(block)] = entry

    # States of layers that keep one, each in a page of its own.

    def write_state(self, layer: int, block: int, state: int) -> None:
        self.write(layer, self._slots_in(block), np.full(self.block_size, state))

    def state(self, layer: int, block: int) -> int | None:
        """What `write_state` wrote; None if something was written over it."""
        held = np.unique(self._slots[self._places_of[layer], self._slots_in(block)])
        return int(held[0]) if len(held) == 1 else None

    def _slots_in(self, block: int) -> Ints:
        return np.arange(block * self.block_size, (block + 1) * self.block_size)

    # Sidecars.

    @property
    def num_groups(self) -> int:
        """Groups of a block."""
        return self.block_size // self.group if self.group else 0

    def write_sidecar(self, layer: int, table: Ints, begin: int, end: int) -> None:
        """Quantises groups [begin, end) of the request with this block table."""
        entries = self.read(layer, table, np.arange(begin * self.group, end * self.group))
        groups = self._places(table, begin, end)
        self._sidecars[self._places_of[layer], groups] = self.checksums(entries)

    def read_sidecar(self, layer: int, table: Ints, count: int) -> Ints:
        """The first `count` groups."""
        return self._sidecars[self._places_of[layer], self._places(table, 0, count)]

    def checksums(self, entries: Ints) -> Ints:
        """What a sidecar holds once it was made of these entries, whole groups of them."""
        return entries.reshape(-1, self.group) @ self._weights

    def _places(self, table: Ints, begin: int, end: int) -> Ints:
        groups = np.arange(begin, end)
        return table[groups // self.num_groups] * self.num_groups + groups % self.num_groups


def _copy(rows: Ints, source: int, target: int, size: int) -> None:
    rows[:, target * size : (target + 1) * size] = rows[:, source * size : (source + 1) * size]


class SidecarIndex:
    """Stands where ``indexes.table`` has an index: `paged` is the layer's number."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def write_in_torch(self, paged: int, sidecar: Any, table: Tensor, begin: int, end: int) -> None:
        self._cache.write_sidecar(paged, table.numpy().astype(np.int64), begin, end)
