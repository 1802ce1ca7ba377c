"""Runs a command until it ends or standard input does, and ends all that it started.

    python guard.py PATIENCE COMMAND...

Who starts this keeps the other end of standard input, and writes to it once the command, a server,
is up. When that process is gone, however it ended, the command is asked to end, and after PATIENCE
seconds killed, or after `START_STOP_S` where it still starts. Imports nothing but the standard
library.
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
# A server that still starts has no answer to finish, and may not heed that it is asked to end.
START_STOP_S = 5.0


def main(patience: float, command: Sequence[str]) -> int:
    """The command's exit code; 128 and the signal that ended it, as shells have it."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_end_with_guard
    )

    def wait_for_the_end() -> None:
        is_up = False
        while os.read(sys.stdin.fileno(), 1):
            is_up = True
        end_server(process, is_up, patience if is_up else min(patience, START_STOP_S))

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    code = process.wait()
    # Engines and workers outlive a server that crashed.
    _signal_group(process.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def end_server(process: "subprocess.Popen[bytes]", is_up: bool, patience: float) -> None:
    """Ends a server and all of its process group, which is its own, within `patience` seconds.

    is_up: whether it answers yet.
    """
    try:
        if is_up:
            process.terminate()
        else:
            # While vLLM's server waits for its engine, SIGTERM is lost on it, SIGINT delayed. The
            # engine and its workers end by Ctrl-C's signal, and the server ends with them.
            _signal_group(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    finally:
        # Engine and workers outlive a server that was killed or crashed, and all of them a second
        # Ctrl-C that ends the wait.
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _end_with_guard() -> None:
    """In the child: it is asked to end when this process is killed."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
