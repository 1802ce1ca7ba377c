"""What an engine's KV cache events leave in the hands of a router that keeps a set of hashes."""

import msgspec
from support import inside
from support.engine import Engine


class Announced:
    """Hashes that are stored and not removed.

    stored, removed: how often it was told so.
    """

    def __init__(self, engine: Engine) -> None:
        self.stored = self.removed = 0
        self._engine, self._held = engine, set[tuple[int, int]]()
        inside.read_events(engine, self._read, lambda: None)

    def _read(self, batch: bytes) -> None:
        """The events of a step, as they go over the wire."""
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, KVEventBatch

        for event in msgspec.msgpack.decode(batch, type=KVEventBatch).events:
            if isinstance(event, AllBlocksCleared):
                self._held.clear()
                continue
            blocks = {(each, event.group_idx) for each in event.block_hashes}
            if isinstance(event, BlockRemoved):
                assert blocks <= self._held, "it removes what was never there, or twice"
                self.removed += len(blocks)
                self._held -= blocks
            else:
                self.stored += len(blocks)
                self._held |= blocks

    def assert_cached(self) -> None:
        """At the end, what is left of them is what the prefix cache has."""
        cached = inside.cached_hashes(self._engine)
        assert self._held == cached, (len(self._held - cached), len(cached - self._held))
