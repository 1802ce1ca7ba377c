"""How a batch's own server ends, by a stand-in for ``vllm serve`` behind a socket."""

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from vllm_kvx.tools.batch import guard
from vllm_kvx.tools.batch.server import own_server

# vLLM's server heeds no signal while it waits for its engine, and ends when the engine does.
STARTS = """
import signal, subprocess, sys

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: None)
subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE).wait()
print("the server ends by itself", file=sys.stderr, flush=True)
"""
# Once it is up, it ends its engine when nothing is left to answer.
SERVES = """
import signal, socketserver, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


path = sys.argv[sys.argv.index("--uds") + 1]
engine = subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE, text=True)
httpd = socketserver.ThreadingUnixStreamServer(path, Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=httpd.shutdown).start())
httpd.serve_forever()
engine.communicate("the last answer")
print("the server ends by itself", file=sys.stderr, flush=True)
"""
ENGINE = """
import signal, sys


def say(text):
    print(text, file=sys.stderr, flush=True)


def end(number, frame):
    say(f"the engine gets {signal.Signals(number).name}")
    sys.exit()


signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
say("the engine is there")
say(f"the engine ends after {sys.stdin.read()}")
"""


def said_after_ctrl_c(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `script` says as the server; Ctrl-C comes when it is up, or once its engine is there."""
    (folder / "serve.py").write_text(script)
    (folder / "engine.py").write_text(ENGINE)
    log, python = folder / "log", folder / "python"
    # The guard runs as it is, and what it is to run is the stand-in.
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = "{guard.__file__}" ]; then exec "{sys.executable}" "$@"; fi\n'
        f'exec "{sys.executable}" "{folder}/serve.py" "{folder}/engine.py" "$@" 2>"{log}"\n'
    )
    python.chmod(0o755)

    def ctrl_c(*_: object) -> None:
        end = time.monotonic() + 60
        while not log.exists() or "the engine is there" not in log.read_text():
            assert time.monotonic() < end
            time.sleep(0.01)
        raise KeyboardInterrupt

    if script == STARTS:  # While the command asks whether it is up.
        monkeypatch.setattr(httpx.Client, "get", ctrl_c)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(KeyboardInterrupt), own_server("model", ["--kv-policy", "full"]):
        ctrl_c()
    return [line for line in log.read_text().splitlines() if line.startswith("the ")]


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
