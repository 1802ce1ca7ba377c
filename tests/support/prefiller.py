"""An engine in a process of its own, which computes prompts for another one to go on with."""

import multiprocessing
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.engine import Answer, Engine

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
# What a router asks of the engine that prefills.
_ASK = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
_WAIT = 0.02


class Prefiller:
    """Speaks with the process. free: blocks of its pool that nobody holds, when asked."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.blocks = self._receive()

    def prefill(
        self, prompts: Sequence[list[int]], policies: Sequence[str | None]
    ) -> list[dict[str, Any]]:
        """Computes the prompts; each one's ``kv_transfer_params`` for the other engine."""
        self._connection.send((prompts, policies))
        return self._receive()

    def free(self) -> int:
        self._connection.send(None)
        return self._receive()

    def _receive(self) -> Any:
        found = self._connection.recv()
        if isinstance(found, str):
            raise AssertionError(f"the engine that prefills: {found}")
        return found


@contextmanager
def prefilling(
    model: Path, policy: str | None, gpu: str | None = None, **options: Any
) -> Iterator[Prefiller]:
    """An engine in another process while the block runs; arguments as of ``running``.

    gpu: the one that it runs on, as CUDA_VISIBLE_DEVICES names it.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(model, policy, gpu, options, there), daemon=True)
    process.start()
    there.close()
    try:
        yield Prefiller(here)
    finally:
        here.close()
        process.join(20)
        process.kill()


def free_port() -> int:
    """One that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _serve(
    model: Path,
    policy: str | None,
    gpu: str | None,
    options: dict[str, Any],
    connection: Connection,
) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ |= {PORT: str(free_port()), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        engine = Engine(model, policy, kv_transfer_config=NIXL, **options)
        connection.send(engine.pool.get_num_free_blocks())
        while True:
            # It is told that blocks were fetched while it steps.
            while not connection.poll(_WAIT):
                engine.llm.llm_engine.step()
            connection.send(_answer(engine, connection.recv()))
    except EOFError:
        pass
    except Exception as error:
        connection.send(repr(error))
        raise


def _answer(engine: Engine, job: Any) -> Any:
    if job is None:
        return engine.pool.get_num_free_blocks()
    prompts, policies = job
    answers: list[Answer] = engine.generate(
        prompts, 1, policies, transfers=[dict(_ASK) for _ in prompts]
    )
    return [answer.transfer for answer in answers]
