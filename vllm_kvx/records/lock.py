"""A lock of servers that share a cache folder, on whatever file system that is.

flock(2) does not reach other hosts on every network file system, and the oldest `filelock` that
vLLM takes never gives up a lock whose holder was killed. So here the lock is a file that only one
process can create. Its holder touches it, and who waits takes it over once it was not touched for
long. Waiters measure that on their own clock: clocks of hosts differ.

Two holders at a time are unlikely, and do no harm but measure twice: a record is renamed into its
place when it is complete.
"""

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Seen(NamedTuple):
    """A lock as it was found: its text, and when it was touched, in nanoseconds."""

    text: str
    touched: int


class Lock:
    """One process's hold on the file `path`, or its wait for it.

    beat: seconds between touches. stale: seconds without one after which the lock is taken over,
        far above `beat` and above the minute for which network file systems may show old times.
    """

    def __init__(self, path: Path, beat: float = 5, stale: float = 90) -> None:
        self.path, self._beat, self._stale = path, beat, stale
        facts = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "process": os.getpid()}
        self._text = json.dumps(facts)
        self._touched = 0.0
        # What a waiter saw last, and since when it has been so.
        self._seen: Seen | None = None
        self._since = 0.0

    def take(self) -> bool:
        """Take the lock if nobody holds it, or its holder has died; to be tried again and again.

        Raises:
            OSError: the file cannot be made.
        """
        if self._create():
            return True
        seen = self._look()
        now = time.monotonic()
        if seen is None or seen != self._seen:
            self._seen, self._since = seen, now
            return False
        if now - self._since < self._stale:
            return False
        self._put_aside(seen.text)
        self._seen = None
        return self._create()

    def keep(self) -> None:
        """Touch the lock, if that is due; one that was taken over meanwhile is left alone."""
        now = time.monotonic()
        if now - self._touched < self._beat:
            return
        self._touched = now
        try:
            if self._is_mine():
                os.utime(self.path)
        except OSError:
            pass  # The next touch may succeed; without any, others take over.

    def release(self) -> None:
        """Give the lock up, if it is still held."""
        try:
            if self._is_mine():
                self.path.unlink()
        except OSError:
            pass  # It goes stale.

    @property
    def holder(self) -> str:
        """Who held the lock when it was last looked at: `process 7 on host-1`."""
        facts: Any = None
        with contextlib.suppress(ValueError):  # It may be half written.
            facts = json.loads(self._seen.text) if self._seen is not None else None
        if not isinstance(facts, Mapping):
            return "another process"
        return f"process {facts.get('process')} on {facts.get('host')}"

    def _create(self) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(self._text)
        self._touched = time.monotonic()
        return True

    def _look(self) -> Seen | None:
        try:
            # Opened, not only asked for its status: network file systems then ask the server.
            with self.path.open(encoding="utf-8") as file:
                return Seen(file.read(), os.fstat(file.fileno()).st_mtime_ns)
        except OSError:
            return None

    def _is_mine(self) -> bool:
        seen = self._look()
        return seen is not None and seen.text == self._text

    def _put_aside(self, text: str) -> None:
        """Remove the lock that has this text, and no other."""
        aside = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        try:
            os.rename(self.path, aside)
            if aside.read_text(encoding="utf-8") != text:
                # Somebody else was quicker, and this is the new holder's.
                os.link(aside, self.path)
        except OSError:
            pass  # Gone, or already held again.
        aside.unlink(missing_ok=True)
