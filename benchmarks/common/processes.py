"""Commands that run beside this one: with a log, on one GPU, and ended with all that they began."""

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# Seconds between asking a process to end and killing it.
PATIENCE = 30


def start(
    command: Sequence[str], log: Path, gpu: str | None, more: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Starts a command with its output at the end of `log`.

    gpu: as CUDA_VISIBLE_DEVICES has it; None leaves that as it is. more: variables.
    """
    environment = {**os.environ, **(more or {})}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        return subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ends what still runs, and the processes that it started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    # What a command left behind holds the GPU's memory.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(command: Sequence[str], log: Path, gpu: str | None) -> int:
    """Runs a command with its output in `log`; its exit code."""
    process = start(command, log, gpu)
    try:
        return process.wait()
    finally:
        stop(process)
