"""The gate on memory finds a leak, and nothing but a leak: on series that are made up."""

import mmap
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from soak.memory import MOST_KIB, TIMES, Sample, Series, growth_kib

LEAK_KIB = 20_000 / 1024  # 20 KB, the least that has to be found.
SIZES = (300, 1000)
Growth = Callable[[float, random.Random], float]

# MiB above the start, by the share of the run that is done. What runs without a leak looked like,
# and worse.
HARMLESS: dict[str, Growth] = {
    "still": lambda share, rng: 0.0,
    "the measurement's own noise": lambda share, rng: rng.uniform(-0.3, 0.3),
    "caches that fill in the first half": lambda share, rng: 100 * min(share / 0.5, 1.0),
    "one arena of an allocator": lambda share, rng: 8.0 * (share > 0.6),
    "one at the end": lambda share, rng: 64.0 * (share > 0.9),
    "one in between": lambda share, rng: 8.0 * (share > 0.75),
    "memory that is given back": lambda share, rng: 8.0 * (0.7 < share < 0.8),
    "peaks of requests that run": lambda share, rng: rng.choice((0, 0, 0, 2.0)),
}


def series(size: int, growth: Growth, leak_kib: float, seed: int, every: int = 1) -> list[Sample]:
    """A run of `size` requests that leaves `leak_kib` behind with each.

    every: an allocator takes memory for the leaks of so many requests at once.
    """
    rng, found = random.Random(seed), []
    for requests in range(1, size + 1, size // TIMES):
        leaked = requests // every * every * leak_kib / 1024
        found.append(Sample(requests, 900 + leaked + growth(requests / size, rng)))
    return found


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("size", SIZES)
def test_no_leak(size: int, name: str) -> None:
    for seed in range(20):
        assert growth_kib(series(size, HARMLESS[name], 0.0, seed)) < MOST_KIB / 2


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("size", SIZES)
def test_a_leak(size: int, name: str) -> None:
    """Alone, and in the noise of a run; in an arena of 1 MiB for every 50 requests, too."""
    for seed in range(20):
        for every in (1, 50 if size == 1000 else 10):
            found = growth_kib(series(size, HARMLESS[name], LEAK_KIB, seed, every))
            assert found > MOST_KIB, (seed, every, found)


def test_what_the_first_gate_let_pass() -> None:
    """It compared the run's end with its first third, and let 48 MiB pass."""
    samples = series(1000, HARMLESS["still"], LEAK_KIB, 0)
    assert samples[-1].mib - samples[len(samples) // 3].mib < 48
    assert growth_kib(samples) == pytest.approx(LEAK_KIB, rel=0.1)


@pytest.mark.parametrize(
    ("leak_kib", "requests", "says"),
    [(0.0, 300, "nothing"), (LEAK_KIB, 300, "a leak"), (999.0, 40, "too short")],
)
def test_the_soaks_own_gate(
    monkeypatch: pytest.MonkeyPatch, leak_kib: float, requests: int, says: str
) -> None:
    memory, mib = Series(requests, ["self"]), [900.0]
    monkeypatch.setattr("soak.memory.resident_mib", lambda pid: mib[0])
    for number in range(1, requests + 1):
        mib[0] += leak_kib / 1024
        memory.after(number)
    assert (memory.figures()["growth_kib_per_request"] is None) == (says == "too short")
    if says == "a leak":
        with pytest.raises(AssertionError, match=r"19\.\d KiB a request"):
            memory.assert_still()
    else:
        memory.assert_still()


def test_too_few_samples_say_nothing() -> None:
    with pytest.raises(AssertionError, match="too few"):
        growth_kib([Sample(1, 900.0), Sample(2, 900.0)])


def test_samples_of_a_process() -> None:
    """What a process allocates is in its memory, and the first and the last request are seen."""
    settled: list[None] = []
    memory = Series(300, ["self"], lambda: settled.append(None))
    held = []
    for requests in range(1, 301):
        # From the system: an allocator may have freed memory of its own.
        pages = mmap.mmap(-1, 64 << 10, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.write(b"x" * (64 << 10))
        held.append(pages)
        memory.after(requests)
    assert len(memory.samples) == len(settled) == 43
    assert 60 < memory.growth_kib < 70
    with pytest.raises(AssertionError, match="KiB a request"):
        memory.assert_still()
    figures = memory.figures()
    assert list(figures["memory_mib"])[:2] == [1, 29]


def test_a_process_that_ended_is_an_error() -> None:
    """And not a server whose memory shrank."""
    gone = max(int(each.name) for each in Path("/proc").glob("[0-9]*")) + 100_000
    with pytest.raises(FileNotFoundError):
        Series(10, [gone]).after(1)
