"""How a batch's own server ends, by a stand-in for ``vllm serve`` behind a socket."""

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from support.stand_in_servers import SERVES, STARTS, said, wait_for_engine, write_scripts

from vllm_kvx.tools.batch import guard
from vllm_kvx.tools.batch.server import own_server


def said_after_ctrl_c(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `script` says as the server; Ctrl-C comes when it is up, or once its engine is there."""
    serve, engine = write_scripts(script, folder)
    log, python = folder / "log", folder / "python"
    # The guard runs as it is, and what it is to run is the stand-in.
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = "{guard.__file__}" ]; then exec "{sys.executable}" "$@"; fi\n'
        f'exec "{sys.executable}" "{serve}" "{engine}" "$@" 2>"{log}"\n'
    )
    python.chmod(0o755)

    def ctrl_c(*_: object) -> None:
        wait_for_engine(log)
        raise KeyboardInterrupt

    if script == STARTS:  # While the command asks whether it is up.
        monkeypatch.setattr(httpx.Client, "get", ctrl_c)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(KeyboardInterrupt), own_server("model", ["--kv-policy", "full"]):
        ctrl_c()
    return said(log)


def test_ctrl_c_at_the_start_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM would be lost on the server, and its engine killed after 30 seconds."""
    begin = time.monotonic()
    assert said_after_ctrl_c(STARTS, tmp_path, monkeypatch) == [
        "the engine is there",
        "the engine gets SIGINT",
        "the server ends by itself",
    ]
    assert time.monotonic() - begin < 20


def test_ctrl_c_lets_a_server_that_is_up_end_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said_after_ctrl_c(SERVES, tmp_path, monkeypatch) == [
        "the engine is there",
        "the engine ends after the last answer",
        "the server ends by itself",
    ]


def test_a_server_that_still_starts_is_killed_soon() -> None:
    deaf = "import signal, time; signal.signal(2, 1); print(1, flush=True); time.sleep(99)"
    command = [sys.executable, guard.__file__, "30", sys.executable, "-c", deaf]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    begin = time.monotonic()
    process.stdin.close()
    assert process.wait(25) == 128 + 9
    assert guard.START_STOP_S - 1 < time.monotonic() - begin < 25
