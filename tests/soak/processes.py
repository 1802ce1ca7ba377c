"""A server's processes, and its engine stopped in between."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import httpx

# Of a slowed engine's time, what it runs for and what it then stands still for at least.
RUNS_S, STANDS_S = 0.01, 0.03


def tree(url: str) -> list[int]:
    """The server's processes: those that have its socket's port in their ancestors' command."""
    port, parents, roots = url.rpartition(":")[2], {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            if f"--port\0{port}\0".encode() in (folder / "cmdline").read_bytes():
                roots.append(int(folder.name))
        except OSError:
            continue
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def engine_of(pids: Sequence[int]) -> int:
    """The engine among a server's processes."""
    (pid,) = (pid for pid in pids if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid


@contextmanager
def stopped(pid: int) -> Iterator[int]:
    """The process does nothing while the block runs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def slowed(url: str) -> Iterator[None]:
    """The server's engine waits for its front, again and again, while the block runs.

    On a busy machine an engine may have answered to the end before the front has sent the first
    token.
    """
    engine, ended = engine_of(tree(url)), Event()

    def take_turns() -> None:
        while not ended.wait(RUNS_S):
            with stopped(engine):
                time.sleep(STANDS_S)
                # Answered once all that the engine sent has been read.
                http.get("/version").raise_for_status()

    with httpx.Client(base_url=url, timeout=300) as http, ThreadPoolExecutor(1) as pool:
        turns = pool.submit(take_turns)
        try:
            yield
        finally:
            ended.set()
        turns.result()


def is_asked_to_end(pid: int) -> bool:
    """Whether SIGTERM waits for a process that is stopped."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(signals & 1 << signal.SIGTERM - 1 for signals in pending)
