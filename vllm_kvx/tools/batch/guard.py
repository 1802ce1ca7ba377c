"""Runs a command until it ends or standard input does, and ends all that it started.

    python guard.py PATIENCE COMMAND...

Who starts this keeps the other end of standard input, and never writes to it. When that process is
gone, however it ended, the command is asked to end, and after PATIENCE seconds killed. A server
that still starts does not hear that it is asked. Imports nothing but the standard library.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

_SET_PARENT_DEATH_SIGNAL = 1  # prctl's


def main(patience: float, command: Sequence[str]) -> int:
    """The command's exit code; 128 and the signal that ended it, as shells have it."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_end_with_guard
    )

    def wait_for_the_end() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        _kill_group(process.pid)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    code = process.wait()
    # Engines and workers outlive a server that crashed.
    _kill_group(process.pid)
    return code if code >= 0 else 128 - code


def _end_with_guard() -> None:
    """In the child: it is asked to end when this process is killed."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
