"""An engine in a process of its own, which computes prompts for another one to go on with."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.nixl import NIXL, PORT, PREFILL
from benchmarks.common.server import free_port
from support.engine import Answer, Engine

Patch = Callable[[pytest.MonkeyPatch], None]

_WAIT = 0.02
# Of both engines. On a busy machine minutes pass until the other one fetches a prompt.
PATIENT = NIXL | {"kv_connector_extra_config": {"kv_lease_duration": 600}}


class Prefiller:
    """Speaks with the process. free: blocks of its pool that nobody holds, when asked."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.blocks = self._receive()

    def prefill(
        self, prompts: Sequence[list[int]], policies: Sequence[str | None], **sampling: Any
    ) -> list[dict[str, Any]]:
        """Computes the prompts; each one's ``kv_transfer_params`` for the other engine."""
        self._connection.send((prompts, policies, sampling, False))
        return self._receive()

    def prefill_interrupted(
        self, prompts: Sequence[list[int]], policies: Sequence[str | None]
    ) -> list[dict[str, Any] | None]:
        """The same, of an engine that plans steps ahead.

        While the first step is under way that ends a prompt, the first of the requests is aborted,
        whose ``kv_transfer_params`` are None, and all others that run are preempted.
        """
        self._connection.send((prompts, policies, {}, True))
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
    model: Path,
    policy: str | None,
    gpu: str | None = None,
    patches: Sequence[Patch] = (),
    **options: Any,
) -> Iterator[Prefiller]:
    """An engine in another process while the block runs; arguments as of ``running``.

    gpu: the one that it runs on, as CUDA_VISIBLE_DEVICES names it. patches: what is changed there
        before it starts.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    args = model, policy, gpu, patches, options, there
    process = context.Process(target=_serve, args=args, daemon=True)
    process.start()
    there.close()
    try:
        yield Prefiller(here)
    finally:
        here.close()
        process.join(20)
        process.kill()


def _serve(
    model: Path,
    policy: str | None,
    gpu: str | None,
    patches: Sequence[Patch],
    options: dict[str, Any],
    connection: Connection,
) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ |= {PORT: str(free_port()), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    for patch in patches:
        patch(pytest.MonkeyPatch())
    try:
        engine = Engine(model, policy, kv_transfer_config=PATIENT, **options)
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
    prompts, policies, sampling, interrupted = job
    transfers = [dict(PREFILL) for _ in prompts]
    if interrupted:
        return _interrupted(engine, engine.submit(prompts, 1, policies, transfers=transfers))
    answers: list[Answer] = engine.generate(prompts, 1, policies, transfers=transfers, **sampling)
    return [answer.transfer for answer in answers]


def _ends(request: Any) -> bool:
    """Whether the step is under way that computes the last token of the request's prompt."""
    return request.num_in_flight_tokens > 0 and (
        request.num_computed_tokens >= request.num_prompt_tokens
    )


def _interrupted(engine: Engine, ids: list[str]) -> list[dict[str, Any] | None]:
    scheduler, told = engine.scheduler, dict[str, dict[str, Any] | None]()
    step = engine.llm.llm_engine.step
    while not any(map(_ends, scheduler.running)):
        step()
    engine.llm.llm_engine.abort_request(ids[:1])
    engine.throw_out(drop_stale_output=scheduler.requires_kv_delivery)
    while engine.llm.llm_engine.has_unfinished_requests():
        told |= {each.request_id: each.kv_transfer_params for each in step() if each.finished}
    return [told.get(name) for name in ids]


def watch_computed(engine: Any) -> list[int]:
    """Grows by the number of tokens of every step that has any."""
    counts: list[int] = []
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            counts.append(output.total_num_scheduled_tokens)
        return output

    engine.scheduler.schedule = watched
    return counts


def wait_for_freed(prefiller: Prefiller) -> None:
    """Blocks are held until the other engine says that it has them."""
    for _ in range(100):
        if prefiller.free() == prefiller.blocks:
            return
        time.sleep(0.05)
    raise AssertionError(f"{prefiller.free()} of {prefiller.blocks} blocks are free")
