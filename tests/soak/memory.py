"""What processes hold, and whether it grows with the requests they have answered."""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# How often a run is measured, about.
TIMES = 40
# Half of a leak of 20 KB. Runs without a leak had 0.3 in the engine's process, and 2.5 in all of a
# server's, whose allocators nobody asks to give back what they do not use.
MOST_KIB = 10.0
# Requests of a run that says anything: a shorter one fills caches to its end.
LEAST = 200


class Sample(NamedTuple):
    """Memory after that many requests."""

    requests: int
    mib: float


class Series:
    """Samples along a run of `requests` requests.

    pids: the processes to measure. settle: called before each sample, where there is something to
    call that has a process give back what it does not use.
    """

    def __init__(
        self,
        requests: int,
        pids: Iterable[int | str],
        settle: Callable[[], None] | None = None,
    ) -> None:
        self.samples: list[Sample] = []
        self._requests = requests
        self._every = max(requests // TIMES, 1)
        self._pids, self._settle = list(pids), settle

    def after(self, requests: int) -> None:
        """Takes a sample if one is due."""
        if not self.samples or requests - self.samples[-1].requests >= self._every:
            if self._settle is not None:
                self._settle()
            self.samples.append(Sample(requests, sum(map(resident_mib, self._pids))))

    @property
    def growth_kib(self) -> float | None:
        """KiB per request; None for a run that is too short to tell."""
        return growth_kib(self.samples) if self._requests >= LEAST else None

    def assert_still(self) -> None:
        """Memory has not grown with the requests."""
        growth = self.growth_kib
        assert growth is None or growth < MOST_KIB, f"{growth:.1f} KiB a request: {self.samples}"

    def figures(self) -> dict[str, Any]:
        """For the soak's file: every fourth sample, and what the gate says of all."""
        growth = self.growth_kib
        return {
            "memory_mib": {each.requests: round(each.mib, 1) for each in self.samples[::4]},
            "growth_kib_per_request": None if growth is None else round(growth, 2),
        }


def growth_kib(samples: Sequence[Sample]) -> float:
    """KiB that each request leaves behind: what a leak is, and noise and warm-up are not.

    Caches fill in the first half of a run, which does not count. Of the third and of the fourth
    quarter each the median slope over all pairs of samples is taken, and then the smaller one: a
    leak grows in both, an allocator that takes one more arena in one of them.
    """
    end = samples[-1].requests
    quarters = [
        [each for each in samples if first <= each.requests / end <= last]
        for first, last in ((0.5, 0.75), (0.75, 1.0))
    ]
    assert all(len(each) > 3 for each in quarters), f"too few samples: {samples}"
    return min(map(_slope, quarters)) * 1024


def _slope(samples: Sequence[Sample]) -> float:
    """MiB per request, by Theil and Sen."""
    return median((b.mib - a.mib) / (b.requests - a.requests) for a, b in combinations(samples, 2))


def resident_mib(pid: int | str = "self") -> float:
    """Memory of a process that no file backs: pages of code that are read late do not count."""
    kib = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            kib += int(line.split()[1])
    return kib / 1024
