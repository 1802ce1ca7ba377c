"""A ``vllm serve`` of a batch's own, behind a Unix socket; it ends with this process."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.batch import guard
from vllm_kvx.tools.serve.command import needs_of

_POLL_S, _STOP_S = 0.5, 30.0
# Flags with which nothing would answer at the socket, or not to this process; and such as would
# have no effect there.
_NOT_AT_A_SOCKET = ("--api-key", "--grpc", "--headless", "--host", "--port", "--uds")


@contextmanager
def own_server(model: str, flags: Sequence[str]) -> Iterator[Path]:
    """Runs ``vllm serve MODEL`` with `flags`; yields its socket once it is up.

    Raises:
        ToolError: a flag is not for a server behind a socket, or the server ends before it is up.
            What it says goes to stderr.
    """
    for name in (flag.partition("=")[0].replace("_", "-") for flag in flags):
        if name in _NOT_AT_A_SOCKET or name.startswith("--ssl-"):
            raise ToolError(f"a batch's own server is behind a Unix socket: drop {name}")
    needs = needs_of([model, *flags])
    if said := needs.says():
        print(f"vllm-kvx batch: {said}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="kvx-batch-") as folder:
        socket = Path(folder) / "socket"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *flags]
        command += [*needs.flags, "--uds", str(socket), "--disable-uvicorn-access-log"]
        guarded = [sys.executable, guard.__file__, str(_STOP_S), *command]
        # A group of its own: Ctrl-C reaches this process alone, which then ends all of them. No
        # session: some kernels let a server that never waits starve other sessions.
        process = subprocess.Popen(
            guarded,
            env={**os.environ, **needs.environment},
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            process_group=0,
        )
        assert process.stdin is not None
        try:
            _wait(process, socket)
            # The guard is told; it may be gone.
            with suppress(BrokenPipeError):
                os.write(process.stdin.fileno(), b"1")
            yield socket
        finally:
            process.stdin.close()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", socket: Path) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=5) as client:
        while process.poll() is None:
            with suppress(httpx.HTTPError):
                if client.get("http://server/health").status_code == 200:
                    return
            time.sleep(_POLL_S)
    raise ToolError(f"the server ended with code {process.returncode} before it was up: see above")
