"""A server in the background, by a stand-in for ``vllm serve``."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.stand_in_servers import SERVES, STARTS, said, wait_for_engine, write_scripts

from benchmarks.common import server
from benchmarks.common.server import serving

# Before it listens, as vLLM's server does, it asks for its port as any other program might.
SERVE = """
import socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

address = "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])
with socket.socket() as other:
    try:
        other.bind(address)
    except OSError:
        print("nobody else gets it", flush=True)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


HTTPServer(address, Handler).serve_forever()
"""


def test_the_port_is_kept_until_the_server_listens(tmp_path: Path) -> None:
    script, log = tmp_path / "serve.py", tmp_path / "log"
    script.write_text(SERVE)
    with (
        serving([], log, os.environ, vllm=[sys.executable, str(script)]) as url,
        urllib.request.urlopen(f"{url}/health", timeout=60) as answer,
    ):
        assert answer.status == 200
    assert "nobody else gets it" in log.read_text()


def said_after_ctrl_c(script: str, log: Path) -> list[str]:
    """What `script` logs as a server; Ctrl-C comes once it is up, if `ctrl_c_at_start` does not."""
    vllm = [sys.executable, *map(str, write_scripts(script, log.parent))]
    with pytest.raises(KeyboardInterrupt), serving([], log, os.environ, vllm=vllm):
        wait_for_engine(log)
        raise KeyboardInterrupt
    return said(log)


@pytest.fixture
def ctrl_c_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(process: object, url: str, log: Path, timeout_s: float) -> None:
        wait_for_engine(log)
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "_wait", wait)


@pytest.mark.usefixtures("ctrl_c_at_start")
def test_ctrl_c_at_the_start_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "START_STOP_S", 300.0)
    assert said_after_ctrl_c(STARTS, tmp_path / "log") == [
        "the engine is there",
        "the engine gets SIGINT",
        "the server ends by itself",
    ]


def test_ctrl_c_lets_a_server_that_is_up_end_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STOP_S", 300.0)
    assert said_after_ctrl_c(SERVES, tmp_path / "log") == [
        "the engine is there",
        "the engine ends after the last answer",
        "the server ends by itself",
    ]


@pytest.mark.parametrize("at_start", [True, False])
def test_a_second_ctrl_c_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    at_start: bool,
) -> None:
    wait, killpg, signals = subprocess.Popen.wait, os.killpg, list[int]()

    def interrupted(process: "subprocess.Popen[bytes]", timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return wait(process)

    def recorded(group: int, number: int) -> None:
        signals.append(number)
        killpg(group, number)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    monkeypatch.setattr(os, "killpg", recorded)
    if at_start:
        request.getfixturevalue("ctrl_c_at_start")
    said_after_ctrl_c(STARTS if at_start else SERVES, tmp_path / "log")
    assert signals[-1:] == [signal.SIGKILL]
