"""The soak's figures: what was done to the server, and what came of it.

One command writes all of them, whatever its parts are and however many processes run them.
"""

import fcntl
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import options

from benchmarks.common.about import about

WHAT = "The soak test: what was done to an engine and a server, and what came of it."
# What tests/run.sh gives pytest before its own arguments.
_RUN = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]


class Report:
    """What one process of a run has to say."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []

    def write(self, path: Path, run: str | None, command: str) -> None:
        """Writes the parts to `path`, beside those of the run's other processes.

        run: what is the same in all processes of a run, and in no other; None: there is one
        process. The figures of other runs are overwritten.
        """
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            before = json.loads(text) if text else {}
            if run is None or before.get("run") != run:
                before = {"about": about(WHAT, command), "run": run, "failed": []}
            failed = sorted({*before["failed"], *self.failed})
            file.truncate(0)
            file.write(json.dumps(before | self.parts | {"failed": failed}, indent=1) + "\n")


_OF_THIS_PROCESS = Report()


def add(part: str, **figures: Any) -> None:
    """Figures of one part; written once the session ends."""
    _OF_THIS_PROCESS.parts[part] = figures


def add_failure(test: str) -> None:
    _OF_THIS_PROCESS.failed.append(test)


def write(argv: Sequence[str]) -> None:
    """Writes all figures to the file of `--soak-output`, if there is one.

    argv: of the pytest that was called.
    """
    path = options.soak_output()
    if path and (_OF_THIS_PROCESS.parts or _OF_THIS_PROCESS.failed):
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
        _OF_THIS_PROCESS.write(Path(path), run, command_of(argv))


def command_of(argv: Sequence[str]) -> str:
    """The command that gives these figures; of files elsewhere it has the names."""
    words = [_without_folder(word) for word in argv[1:]]
    if words[: len(_RUN)] == _RUN:
        command = ["bash", "tests/run.sh", *words[len(_RUN) :]]
    else:
        command = ["python", "-m", "pytest", *words]
    return shlex.join(command)


def _without_folder(word: str) -> str:
    """An argument, of whose absolute path the name is left."""
    option, equals, path = word.rpartition("=")
    return f"{option}{equals}{Path(path).name}" if Path(path).is_absolute() else word
