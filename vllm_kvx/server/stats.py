"""What the workers counted, brought to the API process when somebody asks."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvx.server.engines import read_stats

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

logger = init_logger("vllm.kvx")

FRESH_S = 0.25
WAIT_S = 3.0


class StatsReader:
    """The workers' cumulative counters, read on demand.

    Readers share one call to the engine, and what it brought is served for `FRESH_S` seconds. A
    busy engine answers between two steps: after `WAIT_S` seconds readers get the values before,
    and so they do from a dead one. So somebody has to read now and then, or the values before are
    of long ago, or there are none. Nothing here raises.
    """

    def __init__(
        self, engine_client: "EngineClient", on_read: Callable[[dict[str, Any]], None]
    ) -> None:
        self.engine_client = engine_client
        self.on_read = on_read
        self.latest: dict[str, Any] = {}
        self._read_at = float("-inf")
        self._call: asyncio.Task[None] | None = None
        self._failing = False

    @property
    def is_current(self) -> bool:
        """Whether ``latest`` is of now, give or take `FRESH_S`."""
        return time.monotonic() - self._read_at < 2 * FRESH_S

    async def read(self) -> dict[str, Any]:
        """The counters, see ``engines.read_stats``; {} before the first time."""
        if self._call is None and time.monotonic() - self._read_at >= FRESH_S:
            self._call = asyncio.create_task(self._read())
        if self._call is not None:
            # Not wait_for, which can swallow a cancellation that comes as the call ends.
            await asyncio.wait([self._call], timeout=WAIT_S)
        return self.latest

    async def _read(self) -> None:
        try:
            stats = await read_stats(self.engine_client)
            self.on_read(stats)
            self.latest, self._read_at = stats, time.monotonic()
            self._failing = False
        except Exception as error:
            if not self._failing:
                logger.warning("KV policy counters are not available: %r", error)
            self._failing = True
        finally:
            self._call = None
