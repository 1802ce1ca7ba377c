"""Measuring while a server starts: once for all that share a cache folder, and not for ever.

The measurement is `vllm-kvx calibrate` in a process of its own, which needs the device before the
engine does. One server runs it; the others wait for its record. The log shows how far it is.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, NamedTuple, TypeVar

from vllm_kvx.records.folder import CACHE_VARIABLE, WAY_OUT, cache_problem, cache_root
from vllm_kvx.records.layers import FOLDER, TIME_LEFT
from vllm_kvx.records.lock import Lock

if TYPE_CHECKING:
    from logging import Logger

LIMIT_VARIABLE = "KVX_CALIBRATION_LIMIT"
DEFAULT_LIMIT = 1800.0

_Found = TypeVar("_Found")


class Pace(NamedTuple):
    """Seconds: between two looks, between two lines of the log, and as ``Lock`` takes them."""

    look: float = 1
    log: float = 15
    beat: float = 5
    stale: float = 90


PACE = Pace()


@dataclass(frozen=True)
class Measurement:
    """What is measured.

    what: for the log, `FastKV's layer for MODEL`. lock: name of the lock's file. command: of the
        process that measures; it keeps its record in the cache folder.
    """

    what: str
    lock: str
    command: Sequence[str]


class NotMeasuredError(Exception):
    """There is no result; the message says why, for a sentence in brackets."""


def limit() -> float:
    """Seconds that a start may spend on one measurement; 0 if it may measure nothing.

    Raises:
        ValueError: the variable is no such number.
    """
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        seconds = float(text) if text else DEFAULT_LIMIT
    except ValueError:
        seconds = -1
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            f"{LIMIT_VARIABLE} must be a number of seconds, 0 to measure nothing at start, got "
            f"{text!r}"
        )
    return seconds


def measured(
    measurement: Measurement,
    known: Callable[[Path | None], _Found | None],
    logger: "Logger",
    pace: Pace = PACE,
) -> _Found:
    """What is measured, by this process or by another that shares the cache folder.

    known: what is kept of it in a cache folder, None for the usual one; None if nothing is.

    Raises:
        NotMeasuredError: it took too long, or the process left no result.
        ValueError: see `limit`.
    """
    seconds = limit()
    if not seconds:
        raise NotMeasuredError(f"{LIMIT_VARIABLE}=0, so a start measures nothing")
    run = _Run(measurement, logger, pace, seconds)
    if problem := cache_problem(FOLDER):
        logger.warning(
            "%s. What is measured now is for this start alone, and every start measures.", problem
        )
        with tempfile.TemporaryDirectory() as folder:
            why = run(Path(folder), None)
            return _checked(known(Path(folder)), why)
    path = cache_root() / FOLDER / measurement.lock
    lock: Lock | None = None
    try:
        waiting = Lock(path, pace.beat, pace.stale)
        run.wait_for(waiting)
        lock = waiting
    except OSError as error:
        logger.warning(
            "Servers that start now may all measure %s: %s cannot be locked: %s; %s.",
            measurement.what,
            path,
            error.strerror,
            WAY_OUT,
        )
    why = ""
    try:
        # Others may have measured it meanwhile.
        found = known(None)
        if found is None:
            why = run(None, lock)
            found = known(None)
    finally:
        if lock is not None:
            lock.release()
    return _checked(found, why)


def _checked(found: _Found | None, why: str) -> _Found:
    if found is None:
        raise NotMeasuredError(why)
    return found


class _Run:
    """One start's measurement: the wait, and the process."""

    def __init__(
        self, measurement: Measurement, logger: "Logger", pace: Pace, seconds: float
    ) -> None:
        self.measurement, self.logger, self.pace = measurement, logger, pace
        self.limit = seconds
        self.began = self._logged = time.monotonic()

    def wait_for(self, lock: Lock) -> None:
        """Take the lock, once who measures has it no more."""
        what, waits = self.measurement.what, False
        while not lock.take():
            if not waits:
                self.logger.info("%s measures %s: waiting for it.", lock.holder, what)
            waits = True
            self._check(f"{lock.holder} has been measuring it for")
            self._log(f"waiting for {lock.holder} to measure it")
            time.sleep(self.pace.look)

    def __call__(self, folder: Path | None, lock: Lock | None) -> str:
        """Run the process, which keeps its record in `folder`; the last line that it said.

        folder: None for the usual one.
        """
        self.logger.info(
            "Measuring %s by answers%s. Limit: %s s (%s).",
            self.measurement.what,
            "; this is done once" if folder is None else "",
            f"{self.limit:,.0f}",
            LIMIT_VARIABLE,
        )
        env = dict(os.environ) if folder is None else {**os.environ, CACHE_VARIABLE: str(folder)}
        # It ends with this process: what it says next finds nobody to read it.
        process = subprocess.Popen(
            self.measurement.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=env,
        )
        progress = Progress()
        assert process.stderr is not None
        reader = Thread(target=_read, args=(process.stderr, progress), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                if lock is not None:
                    lock.keep()
                self._check("it took")
                self._log(str(progress))
                try:
                    process.wait(self.pace.look)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            reader.join(timeout=5)
        if process.returncode and progress.last:
            return progress.last
        return "the measurement left no result"

    def _check(self, what: str) -> None:
        if time.monotonic() - self.began >= self.limit:
            raise NotMeasuredError(
                f"{what} longer than {self.limit:,.0f} s, the limit of a start, which "
                f"{LIMIT_VARIABLE} raises"
            )

    def _log(self, state: str) -> None:
        now = time.monotonic()
        if now - self._logged < self.pace.log:
            return
        self._logged = now
        self.logger.info(
            "Measuring %s: %s; %.0f s so far, limit %s s.",
            self.measurement.what,
            state,
            now - self.began,
            f"{self.limit:,.0f}",
        )


class Progress:
    """How far `vllm-kvx calibrate` is, from what it says on stderr.

    last: its last line.
    """

    _LINE = re.compile(r"(?P<part>prompt|answers under [^:]+:) (?P<number>\d+)/(?P<count>\d+)")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.last = ""
        self._clock = clock
        # Of the part that runs: its name, the numbers where it began and is, and when it began.
        self._part, self._first, self._number, self._count, self._began = "", 0, 0, 0, 0.0
        self._line = "loading the model"

    def read(self, line: str) -> None:
        """Takes in the next line that the tool wrote on stderr."""
        if not (line := line.strip()):
            return
        self.last = line
        match = self._LINE.match(line)
        if match is None:
            return
        # The tool's own estimate is of when it wrote the line, and this one goes on.
        self._line = line.partition(TIME_LEFT)[0]
        part, number = match["part"], int(match["number"])
        if part != self._part or number <= self._number:
            self._part, self._first, self._began = part, number, self._clock()
        self._number, self._count = number, int(match["count"])

    def __str__(self) -> str:
        """`prompt 3/16, 2048 tokens, about 40 s left of these`."""
        done = self._number - self._first
        if not done:
            return self._line
        left = (self._clock() - self._began) / done * (self._count - self._number + 1)
        return f"{self._line}, about {left:.0f} s left of these"


def _read(pipe: IO[str], progress: Progress) -> None:
    with pipe:
        for line in pipe:
            progress.read(line)


def command_of(*arguments: str) -> list[str]:
    """The command line of a `vllm-kvx` of this interpreter."""
    return [sys.executable, "-m", "vllm_kvx.cli", *arguments]
