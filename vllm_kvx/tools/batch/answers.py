"""The file of a batch's answers: what is in it stays, and a run that was killed goes on.

A line is one write to a file that is open for appending, so a process that is killed leaves at
most its last line torn; that one is cut off when the next run begins. What the machine itself
forgets when it loses power is bounded by ``sync``, which a run calls every second.

Errors that are asked again leave the file before they are, all at once: a file without them takes
its place. So at any time the file has one line for a line of input, or none.
"""

import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.batch import strict_json
from vllm_kvx.tools.batch.lines import id_of, raw_lines

# No file has more lines than 18 digits count.
_ID = re.compile(r"line-([1-9][0-9]{0,17})-[0-9a-f]{16}")
# How every line begins.
_BEGIN = b'{"id": "line-'
# An answer's line has a reply within two objects.
_DEPTH = strict_json.DEPTH + 2
_ELSEWHERE = "name another file for the answers, or move this one away"


class _Answer(NamedTuple):
    """What a line of the file says.

    number, id: of the line of input that it answers. custom_id: of the request; None if it was
    none. refused: whether the answer is an error, of the server or of the line itself.
    """

    number: int
    id: str
    custom_id: str | None
    refused: bool


class Answers:
    """The file, which this process alone writes while it is open.

    Attributes:
        done: by number of the input's lines that have their answer already, its id.
        again: numbers of the input's lines whose answer is an error and that are asked again.
        custom_ids: those of the requests in `done`.
    """

    def __init__(self, path: Path) -> None:
        """Opens or makes the file, and changes nothing of it.

        Raises:
            ToolError: it cannot be written, another run writes it, or it holds something else.
        """
        self.path = path
        self.done: dict[int, str] = {}
        self.again: set[int] = set()
        self.custom_ids: set[str] = set()
        self._custom_ids: dict[int, str] = {}
        # Lines of input whose answer in the file is an error, and those that are to leave it.
        self._errors: frozenset[int] = frozenset()
        self._dropped: frozenset[int] = frozenset()
        self._end = 0
        self._file = self._open()
        # Since it was opened, a run that asks errors again may have put another in its place.
        while not self._is_at_path():
            self.close()
            self._file = self._open()
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def check(self, batch: Path, retry_errors: bool = False) -> int:
        """How many lines `batch` has, of which those that are done are the ones answered here.

        A torn last line is cut off then, and the file ready for more.

        retry_errors: errors are no answers then, whatever `batch` has in the place of their lines;
            `drop_errors` is to be called before the first `add`.

        Raises:
            ToolError: an answer is to another line than the batch has there.
        """
        if retry_errors:
            self._dropped = self._errors
            for number in self._dropped:
                del self.done[number]
                self._custom_ids.pop(number, None)
        count, left, again = 0, dict(self.done), set()
        for number, raw in raw_lines(batch):
            count += 1
            found = left.pop(number, None)
            if found is not None and found != id_of(number, raw):
                raise ToolError(
                    f"{self.path} has the answer to another line {number} than {batch} has: "
                    + self._way_out(number)
                )
            if number in self._dropped:
                again.add(number)
        if left:
            number = min(left)
            raise ToolError(
                f"{self.path} has the answer to a line {number}, which {batch} does not have: "
                + self._way_out(number)
            )
        self.again, self.custom_ids = again, set(self._custom_ids.values())
        os.ftruncate(self._file, self._end)
        with suppress(OSError):
            # Of a run that was killed while it wrote it.
            self._beside().unlink()
        return count

    def drop_errors(self) -> None:
        """Has the errors that `check` let be asked again leave the file, all or none of them.

        Raises:
            ToolError: a file without them could not be put in its place; nothing has changed then.
        """
        if not self._dropped:
            return
        beside = self._beside()
        try:
            new = os.open(beside, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                self._copy_without_errors(new)
                os.replace(beside, self.path.resolve())
            except BaseException:
                os.close(new)
                beside.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise ToolError(
                f"{self.path}: no file without its errors can take its place: {error.strerror}"
            ) from error
        # Nobody else has the new one: it was locked before it had this name.
        self.close()
        self._file, self._dropped = new, frozenset()
        folder = os.open(beside.parent, os.O_RDONLY)
        with suppress(OSError):  # Not every file system can.
            os.fsync(folder)
        os.close(folder)

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
        """Closes the file of answers, which another run may then open."""
        os.close(self._file)

    def _open(self) -> int:
        """The file, locked."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ToolError(f"{self.path}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise ToolError(
                f"{self.path} is no regular file, in which a run could find its answers"
            )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise ToolError(f"{self.path}: another run writes it; wait for it, or end it") from None
        return file

    def _is_at_path(self) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file), os.stat(self.path))
        return False

    def _beside(self) -> Path:
        """What takes the file's place, in the folder where it lies and not where a link to it does.

        Only who holds the file's lock makes or removes it.
        """
        target = self.path.resolve()
        return target.with_name(f".{target.name}.retry")

    def _copy_without_errors(self, new: int) -> None:
        """Writes what stays to `new`, which is locked and on the disk then."""
        fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
        old = os.fstat(self._file)
        with suppress(PermissionError):
            os.fchown(new, old.st_uid, old.st_gid)  # Another user's file becomes this one's.
        os.fchmod(new, stat.S_IMODE(old.st_mode))
        with self.path.open("rb") as lines, open(new, "wb", closefd=False) as file:
            for raw in lines:
                if _answer(raw).number not in self._dropped:
                    file.write(raw)
        os.fsync(new)

    def _way_out(self, number: int) -> str:
        if number in self._errors - self._dropped:
            return f"it is an error, which --retry-errors asks again; or {_ELSEWHERE}"
        return _ELSEWHERE

    def _read(self) -> None:
        """Finds what is answered, and where the whole lines end."""
        errors = set()
        with self.path.open("rb") as file:
            for line, raw in enumerate(file, 1):
                whole = raw.endswith(b"\n")
                if not whole and _is_torn(raw):
                    break  # The write was cut off, and the answer did not count.
                try:
                    if not whole:
                        raise ValueError("it has no end")
                    answer = _answer(raw)
                except ValueError as error:
                    raise ToolError(
                        f"{self.path}: line {line} is no answer of a batch ({error}): {_ELSEWHERE}"
                    ) from None
                if answer.number in self.done:
                    raise ToolError(f"{self.path}: line {line} is there twice: {_ELSEWHERE}")
                self.done[answer.number] = answer.id
                if answer.custom_id is not None:
                    self._custom_ids[answer.number] = answer.custom_id
                if answer.refused:
                    errors.add(answer.number)
                self._end += len(raw)
        self._errors = frozenset(errors)


def _is_torn(raw: bytes) -> bool:
    """Whether this can be the beginning of an answer, or a block that the disk lost of one."""
    return raw.startswith(_BEGIN) or _BEGIN.startswith(raw) or not raw.strip(b"\0")


def _answer(raw: bytes) -> _Answer:
    """What the line `raw` says.

    Raises:
        ValueError: it is no answer.
    """
    fields = strict_json.loads(raw, _DEPTH)
    if not isinstance(fields, dict):
        raise ValueError("it is no object")
    name, response, error = (fields.get(key) for key in ("id", "response", "error"))
    match = _ID.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError("its id names no line")
    if not isinstance(response, dict) and error is None:
        raise ValueError("it has neither response nor error")
    custom_id = fields.get("custom_id")
    return _Answer(
        int(match[1]),
        match[0],
        custom_id if isinstance(response, dict) and isinstance(custom_id, str) else None,
        error is not None or not isinstance(response, dict) or response.get("status_code") != 200,
    )
