"""How long a piece of device work takes, and for whom it ran, without waiting for it."""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from types import TracebackType

import torch

# Parts of a whole, by policy row; they add up to 1.
Shares = Mapping[int, float]


def shares_of(weights: Iterable[tuple[int, int]]) -> Shares:
    """Shares of work by policy row, in proportion to weights; a row may come several times."""
    sums: dict[int, int] = {}
    for row, weight in weights:
        sums[row] = sums.get(row, 0) + weight
    total = sum(sums.values())
    return {row: weight / total for row, weight in sums.items()} if total else {}


class PhaseTimer:
    """Adds up the device time between entering and leaving it.

    On a GPU two events are recorded and read once both have passed; on CPU the clock is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, Shares]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._seconds = 0.0
        self._by_row: dict[int, float] = {}
        self._shares: Shares = {}
        self._begin = 0.0

    def of(self, shares: Shares) -> "PhaseTimer":
        """Itself, to be entered once for the policies that the work is shared by."""
        self._shares = shares
        return self

    def __enter__(self) -> None:
        if not self._on_gpu:
            self._begin = time.perf_counter()
            return
        begin, end = self._event(), self._event()
        begin.record()
        self._pending.append((begin, end, self._shares))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._on_gpu:
            self._pending[-1][1].record()
        else:
            self._add(time.perf_counter() - self._begin, self._shares)
        self._shares = {}

    @property
    def seconds(self) -> float:
        """Device seconds of all uses that are over."""
        self.collect()
        return self._seconds

    @property
    def seconds_by_row(self) -> dict[int, float]:
        """The same by policy row; uses without shares are not in it."""
        self.collect()
        return dict(self._by_row)

    def collect(self) -> None:
        """Reads what is over, so that its events can be used again."""
        while self._pending and self._pending[0][1].query():
            begin, end, shares = self._pending.popleft()
            self._add(begin.elapsed_time(end) / 1000, shares)
            self._spare += (begin, end)

    def _add(self, seconds: float, shares: Shares) -> None:
        self._seconds += seconds
        for row, share in shares.items():
            self._by_row[row] = self._by_row.get(row, 0.0) + share * seconds

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
