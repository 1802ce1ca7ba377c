"""A ``vllm serve`` in the background, for the demo and the tests."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.common.files import ROOT
from vllm_kvx.tools.batch.guard import START_STOP_S, end_server

CHECKPOINT = ROOT / "tests" / "checkpoints" / "lookup-8l"
HOST = "127.0.0.1"
STOP_S = 20.0
# The last line of a traceback, behind what a logger puts before it.
_ERROR = re.compile(r"(?:^|\s)(?:\w+\.)*\w+(?:Error|Exception)(?:: |$)")


class ServerError(RuntimeError):
    """The server ended or did not come up; the message ends with what it logged last."""


def vllm_command() -> str:
    """The ``vllm`` command of this Python's environment."""
    return str(Path(sys.executable).parent / "vllm")


def cpu_environment() -> dict[str, str]:
    """This environment, with vLLM's GPU runner on CPU and a KV cache that fits anywhere."""
    return os.environ | {
        "KVX_CPU": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@contextmanager
def serving(
    flags: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    timeout_s: float = 300.0,
    vllm: Sequence[str] = (),
) -> Iterator[str]:
    """Runs ``vllm serve`` with `flags` on a free port; yields its address, stops it in any case.

    log: file that takes the server's output.
    vllm: the command, where it is not `vllm_command`.

    Raises:
        ServerError: the server ended, or was not up after `timeout_s` seconds.
    """
    with _kept_port() as port:
        command = [*(vllm or [vllm_command()]), "serve", *flags]
        command += ["--host", HOST, "--port", str(port)]
        with log.open("wb") as output:
            # A group of its own: Ctrl-C reaches this process alone, which then ends all of them.
            # No session: by those Linux may group processes, and some kernels let an engine that
            # never waits keep another session's processes from running for seconds.
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=env, process_group=0
            )
        is_up = False
        try:
            url = f"http://{HOST}:{port}"
            _wait(process, f"{url}/health", log, timeout_s)
            is_up = True
            yield url
        finally:
            end_server(process, is_up, STOP_S if is_up else START_STOP_S)


def log_tail(log: Path, lines: int = 60) -> str:
    """The last lines of a log, and before them its first error, if that is not among them.

    An engine core and its workers log what went wrong long before the server that it ends.
    """
    text = log.read_text(errors="replace").splitlines()
    tail = text[-lines:]
    first = next((line for line in text if _ERROR.search(line) and "WARNING" not in line), None)
    return "\n".join(tail if first is None or first in tail else [first, "...", *tail])


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerError(f"the server ended ({process.returncode}):\n{log_tail(log)}")
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise ServerError(f"the server was not up after {timeout_s:.0f} s:\n{log_tail(log)}")


@contextmanager
def _kept_port() -> Iterator[int]:
    """A port that no other program is given before the server listens, which takes a while.

    Linux lets two sockets that set SO_REUSEADDR, as vLLM's does, have a port of which one of them
    at most listens; who asks for any port gets another one.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((HOST, 0))
        yield int(kept.getsockname()[1])


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def post(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> int:
    """The status that a JSON body is answered with."""
    data = json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, sent)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
