"""An LMCache server in a process of its own, and what engines need to meet it."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.processes import start, stop
from benchmarks.common.server import free_port
from support.engine import BLOCK, Engine

CHUNK = 2 * BLOCK  # Tokens that it stores as one.
_UP = "cache server is running..."
# Seconds to wait for the server, and for what it stores.
_PATIENCE = 60.0


@contextmanager
def lmcache_server(log: Path) -> Iterator[dict[str, Any]]:
    """Yields the ``kv_transfer_config`` of engines that use the server, while it runs.

    Chunks are short, so that short prompts have some.
    """
    port = free_port()
    options = f"--port {port} --chunk-size {CHUNK} --l1-size-gb 0.25 --eviction-policy LRU"
    # Engines on GPUs hand it their memory; those on CPUs copy by themselves.
    options += " --supported-transfer-mode auto --disable-observability"
    module = [sys.executable, "-m", "lmcache.v1.multiprocess.server"]
    process = start([*module, *options.split()], log, None, {"LMCACHE_TRACK_USAGE": "false"})
    try:
        until = time.monotonic() + _PATIENCE
        while _UP not in (told := log.read_text("utf-8")):
            assert process.poll() is None and time.monotonic() < until, told
            time.sleep(0.05)
        extra = {"lmcache.mp.port": port, "lmcache.mp.mq_timeout": _PATIENCE}
        yield {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    finally:
        stop(process)


def settle(engine: Engine) -> None:
    """Steps an idle engine until all that it has stored is there; blocks are held until then."""
    until = time.monotonic() + _PATIENCE
    while engine.pool.get_num_free_blocks() < engine.pool.num_gpu_blocks - 1:
        assert time.monotonic() < until, "LMCache does not say that it has stored a prompt"
        engine.core.step_fn()
        time.sleep(0.001)
