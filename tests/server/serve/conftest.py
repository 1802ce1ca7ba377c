"""A server for the tests of this folder, which is asked as users ask.

A start takes longer than all that it is asked. Its files run in one process, in the order of
``LONG``: see tests/conftest.py. The last test ends it.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.served import CUTOFF, FLAGS, LAYERS, Server

from benchmarks.common.server import CHECKPOINT, cpu_environment, log_tail, serving
from vllm_kvx.records.tuned_weights import Agreement, TunedRecord


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "server.log"


@pytest.fixture(scope="session")
def server(log: Path) -> Iterator[Server]:
    """It serves the demo checkpoint, beside which lies a record that it was tuned for speed-4."""
    model = log.parent / "model"
    shutil.copytree(CHECKPOINT, model)
    figures: Agreement = {"kl": 0.03, "greedy": 0.971, "tokens": 400}
    TunedRecord(
        **{"policy": f"speed-{CUTOFF}", "original": "demo", "layers": LAYERS, "method": "full"},
        **{"loss": "self-distillation", "data": {}, "training": {}, "versions": {}},
        **{"agreement": {"before": figures, "after": figures}, "command": "c", "date": "d"},
    ).write(model)
    # Tests of tools that ran before in this process may have made vLLM's log quiet.
    loud = cpu_environment() | {"VLLM_LOGGING_LEVEL": "INFO"}
    with serving([str(model), *FLAGS[1:]], log, loud) as url:
        yield Server(url)


@pytest.fixture(autouse=True)
def server_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shows the end of the server's log if a test brought the server down."""
    yield
    if "server" not in request.fixturenames:
        return
    server = request.getfixturevalue("server")
    if server.was_asked_to_end:
        return
    try:
        server.http.get("/health").raise_for_status()
    except httpx.HTTPError as error:
        tail = log_tail(request.getfixturevalue("log"), 150)
        pytest.exit(f"the server is gone: {error!r}\n{tail}", returncode=1)
