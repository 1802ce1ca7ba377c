"""How long requests take under each policy, as the scheduler sees them."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

# Upper bounds in seconds of the histograms by policy: of the first token, and of each later one.
FIRST_TOKEN_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


PER_TOKEN_BOUNDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)


class Histogram:
    """Counts by upper bound, as Prometheus has them: those of smaller bounds are in them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        # The last one is of what exceeds all bounds.
        self._counts = [0] * (len(bounds) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Adds one observation; a clock that was set back gives none below 0."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.seconds += max(seconds, 0.0)

    def cumulative(self) -> list[int]:
        """How many took at most each bound, and how many there were."""
        total, counts = 0, []
        for count in self._counts:
            total += count
            counts.append(total)
        return counts


@dataclass
class _Running:
    """A request that has not ended; first: when its first token came, None before."""

    row: int
    arrival: float
    first: float | None = None


class Latencies:
    """Histograms by policy row.

    A request's first token is timed from its arrival at the API, which vLLM stamps with the wall
    clock of the same machine; the later ones by their mean. Of an aborted request only the first
    counts, if it came.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._running: dict[str, _Running] = {}
        # Those without a first token: while there is none, a step costs nothing.
        self._pending: set[str] = set()
        self._first: dict[int, Histogram] = {}
        self._later: dict[int, Histogram] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def begin(self, request: Request, row: int) -> None:
        """A request came; its policy is counted in `row`."""
        self._running[request.request_id] = _Running(row, request.arrival_time)
        self._pending.add(request.request_id)

    def add_step(self, outputs: Iterable[EngineCoreOutput]) -> bool:
        """Looks for first tokens in a step's outputs; whether there was one."""
        if not self._pending:
            return False
        now = self._clock()
        came = [o.request_id for o in outputs if o.new_token_ids and o.request_id in self._pending]
        for request_id in came:
            self._add_first(request_id, now)
        return bool(came)

    def end(self, request: Request, is_told: bool = True) -> None:
        """A request ended, by itself or not.

        is_told: whether the tokens that it has were given to anybody, or are about to be.
        """
        request_id = request.request_id
        running = self._running.get(request_id)
        if running is None:
            return
        now, tokens = self._clock(), request.num_output_tokens
        is_whole = request.status != RequestStatus.FINISHED_ABORTED
        if running.first is None and tokens and is_told:
            # With its first token: vLLM frees it before it tells.
            self._add_first(request_id, now)
        elif running.first is not None and tokens > 1 and is_whole:
            histogram = self._later.setdefault(running.row, Histogram(PER_TOKEN_BOUNDS))
            histogram.add((now - running.first) / (tokens - 1))
        self._pending.discard(request_id)
        del self._running[request_id]

    def _add_first(self, request_id: str, now: float) -> None:
        running = self._running[request_id]
        running.first = now
        self._pending.discard(request_id)
        histogram = self._first.setdefault(running.row, Histogram(FIRST_TOKEN_BOUNDS))
        histogram.add(now - running.arrival)

    def as_dict(self, names: Iterable[tuple[str, int]]) -> dict[str, dict[str, list[float]]]:
        """Each kind of latency by policy name: counts up to each bound, then the sum of seconds.

        names: policies and their rows; one that has no requests yet is left out.
        """
        kinds = {"first_token": self._first, "per_token": self._later}
        return {
            kind: {
                name: [*rows[row].cumulative(), rows[row].seconds]
                for name, row in names
                if row in rows
            }
            for kind, rows in kinds.items()
        }
