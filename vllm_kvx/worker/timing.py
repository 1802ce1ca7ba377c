"""How long a piece of device work takes, without waiting for it."""

import time
from collections import deque
from types import TracebackType

import torch


class PhaseTimer:
    """Adds up the device time between entering and leaving it.

    On a GPU two events are recorded and read once both have passed; on CPU the clock is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._seconds = 0.0
        self._begin = 0.0

    def __enter__(self) -> None:
        if not self._on_gpu:
            self._begin = time.perf_counter()
            return
        begin, end = self._event(), self._event()
        begin.record()
        self._pending.append((begin, end))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._on_gpu:
            self._seconds += time.perf_counter() - self._begin
            return
        self._pending[-1][1].record()

    @property
    def seconds(self) -> float:
        """Device seconds of all uses that are over."""
        self.collect()
        return self._seconds

    def collect(self) -> None:
        """Reads what is over, so that its events can be used again."""
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            self._seconds += begin.elapsed_time(end) / 1000
            self._spare += (begin, end)

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
