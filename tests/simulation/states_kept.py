"""States of tokens that go to blocks and come back: the worker's copies."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from simulation.cache import Cache, Mismatch, State
from simulation.live import Ints


class StatesKept:
    """stashed: see ``Model``."""

    def __init__(self, cache: Cache, stashed: dict[int, State], counts: Counter[str]) -> None:
        self._cache, self._stashed, self._counts = cache, stashed, counts

    def copy_in(self, rows: Ints, blocks: Sequence[int]) -> None:
        self._counts["states read"] += len(rows)
        states = chain(*map(self._cache.states, blocks))
        self._stashed.update(zip(rows.tolist(), states, strict=True))

    def copy_out(self, rows: Ints, blocks: Sequence[int]) -> None:
        self._counts["states kept"] += len(rows)
        states = [self._stashed[row] for row in rows.tolist()]
        size = len(rows) // len(blocks)
        for number, block in enumerate(blocks):
            self._cache.keep_states(block, states[number * size : (number + 1) * size])

    def carry(self, source: int, target: int) -> None:
        """A state goes on in another block."""
        self._counts["states carried"] += 1
        if target == 0:
            raise Mismatch("a state goes to a block that nobody holds")
        self._cache.copy(source, target)
