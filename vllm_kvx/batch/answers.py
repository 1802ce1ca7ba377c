"""The file of a batch's answers: what is in it stays, and a run that was killed goes on.

A line is one write to a file that is open for appending, so a process that is killed leaves at
most its last line torn; that one is cut off when the next run begins. What the machine itself
forgets when it loses power is bounded by ``sync``, which a run calls every second.
"""

import fcntl
import json
import os
import re
import stat
from pathlib import Path

from vllm_kvx.batch.lines import id_of, raw_lines
from vllm_kvx.errors import ToolError

_ID = re.compile(r"line-(\d+)-[0-9a-f]{16}")
# How every line begins.
_BEGIN = b'{"id": "line-'


class Answers:
    """The file, which this process alone writes while it is open.

    Attributes:
        done: by number of the input's lines that have their answer already, its id.
    """

    def __init__(self, path: Path) -> None:
        """Opens or makes the file, and changes nothing of it.

        Raises:
            ToolError: it cannot be written, another run writes it, or it holds something else.
        """
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ToolError(f"{path}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise ToolError(f"{path} is no regular file, in which a run could find its answers")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise ToolError(f"{path}: another run writes it; wait for it, or end it") from None
        try:
            self.done = self._read()
        except BaseException:
            self.close()
            raise

    def check(self, batch: Path) -> int:
        """How many lines `batch` has, of which those that are done are the ones answered here.

        A torn last line is cut off then, and the file ready for more.

        Raises:
            ToolError: an answer is to another line than the batch has there.
        """
        count, left = 0, dict(self.done)
        for number, raw in raw_lines(batch):
            count += 1
            found = left.pop(number, None)
            if found is not None and found != id_of(number, raw):
                raise ToolError(
                    f"{self.path} has the answer to another line {number} than {batch} has: name "
                    "another file for the answers, or move this one away"
                )
        if left:
            raise ToolError(
                f"{self.path} has the answer to a line {min(left)}, which {batch} does not have: "
                "name another file for the answers, or move this one away"
            )
        os.ftruncate(self._file, self._end)
        return count

    def add(self, line: bytes) -> None:
        """Appends one line, newline included.

        Raises:
            OSError: it could not be written, as on a full disk; nothing of it is in the file then.
        """
        end = os.fstat(self._file).st_size
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError:
            # Others add lines until all have heard of it; none may follow half a line.
            os.ftruncate(self._file, end)
            raise

    def sync(self) -> None:
        """Has what was added written to the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Gives the file free."""
        os.close(self._file)

    def _read(self) -> dict[int, str]:
        done: dict[int, str] = {}
        end = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                whole = raw.endswith(b"\n")
                if not whole and _is_torn(raw):
                    break  # The write was cut off, and the answer did not count.
                found = _id(raw) if whole else None
                if found is None or found[0] in done:
                    why = "is no answer of a batch" if found is None else "is there twice"
                    raise ToolError(
                        f"{self.path}: line {number} {why}: name another file for the answers, or "
                        "move this one away"
                    )
                done[found[0]] = found[1]
                end += len(raw)
        self._end = end
        return done


def _is_torn(raw: bytes) -> bool:
    """Whether this can be the beginning of an answer, or a block that the disk lost of one."""
    return raw.startswith(_BEGIN) or _BEGIN.startswith(raw) or not raw.strip(b"\0")


def _id(raw: bytes) -> tuple[int, str] | None:
    """Number and id of the line of input that `raw` answers."""
    try:
        name = json.loads(raw)["id"]
        match = _ID.fullmatch(name)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (int(match[1]), name) if match else None
