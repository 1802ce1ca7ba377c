"""How what a request should have in the cache changes beside the passes that it runs."""

from collections.abc import Mapping, Sequence

import numpy as np

from simulation.cache import Mismatch
from simulation.live import Expected, Ints, Live, Made


class Expectations:
    """Of one worker, over the layers that it has.

    starts: by layer of the model, the first one of its KV stage. layers: those of the worker.
    """

    def __init__(
        self,
        expected: Expected,
        by_state: dict[int, Live],
        starts: Sequence[int],
        layers: Sequence[int],
        block_size: int,
    ) -> None:
        self._expected, self._by_state, self._size = expected, by_state, block_size
        self._starts, self._layers = starts, layers

    def begin(self, one: Live, came: Mapping[int, Ints] | None) -> None:
        """What a prefix hit brings is as if the request had computed it.

        came: by layer, what another server has left of its prompt and it goes on with.

        Raises:
            Mismatch: all of the prompt came, and is not what the request would compute.
        """
        made = Made(self._by_state, np.full(one.done, one.index), np.arange(one.done), False, True)
        for layer in self._layers:
            entries, stored = made.in_layer(layer, self._starts[layer])
            own = entries[stored]
            if came is not None:
                left = came[layer][: one.stored_len(layer)]
                if one.is_shared and not np.array_equal(left, own):
                    raise Mismatch(f"{one}, layer {layer}: others came than its own would be")
                own = left
            self._expected.put(layer, one.index, own)

    def left_by(self, one: Live) -> dict[int, Ints]:
        """By layer, what it has now."""
        return {layer: self._expected.of(layer, one.index).copy() for layer in self._layers}

    def keep(self, one: Live, by_start: Mapping[int, Sequence[int]]) -> None:
        """Keeps these blocks alone. by_start: by the first layer of a KV stage."""
        size, expected = self._size, self._expected
        for layer in self._layers:
            blocks = by_start.get(self._starts[layer])
            if blocks is not None:
                entries = expected.of(layer, one.index)
                parts = [entries[block * size : (block + 1) * size] for block in blocks]
                expected.put(layer, one.index, np.concatenate(parts))
