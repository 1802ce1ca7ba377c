"""`vllm-kvx batch`: asks a server for every line's answer, and writes what it says."""

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.batch.answers import Answers
from vllm_kvx.tools.batch.lines import Line, answer_line, duplicate, error_line, read_lines
from vllm_kvx.tools.batch.replies import Meaning, Reply, is_well, read_reply
from vllm_kvx.tools.batch.server import own_server

SYNC_S = 1.0
# Waits before a request is sent again, where the server is busy or cannot be reached.
RETRY_S = (1.0, 2.0, 4.0, 8.0)
# An answer may take hours; a connection may not. Of a host that is gone without a word the kernel
# is to ask after a minute, and to give up after another.
_TIMEOUT = httpx.Timeout(None, connect=10)
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
]
# Integers that JSON's readers agree on; no server counts more tokens.
_MOST_TOKENS = 2**53


class ServerGoneError(Exception):
    """The server does not answer any more, or its engine is dead."""


@dataclass
class Progress:
    """What was done, in this run and before.

    total: lines of the batch. before: answered by earlier runs, and not asked again. answered,
    refused: in this one, with a status below 400 and others, lines that are no requests among them.
    prompt, generated: tokens of its answers, as the server counts them.
    """

    total: int
    before: int
    answered: int = 0
    refused: int = 0
    prompt: int = 0
    generated: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, status: int, body: Any) -> None:
        """Counts one answer, by its HTTP status, and the tokens that its body says it took."""
        if status >= 400:
            self.refused += 1
            return
        self.answered += 1
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            # The second of each pair is the name in /v1/responses.
            self.prompt += _tokens(usage, "prompt_tokens", "input_tokens")
            self.generated += _tokens(usage, "completion_tokens", "output_tokens")

    @property
    def done(self) -> int:
        """Lines that have their answer."""
        return self.before + self.answered + self.refused

    def as_json(self) -> dict[str, float]:
        """What this run did; seconds: from when the server was up."""
        return {
            "lines": self.total,
            "by_earlier_runs": self.before,
            "answered": self.answered,
            "errors": self.refused,
            "prompt_tokens": self.prompt,
            "generated_tokens": self.generated,
            "seconds": round(time.monotonic() - self.began, 3),
        }

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self.began, 1e-9)
        here = self.answered + self.refused
        text = f"{self.done:,} of {self.total:,} lines"
        if self.before:
            text += f", {self.before:,} by earlier runs"
        text += (
            f", {self.refused:,} errors; {here / seconds:.2f} lines/s, {self.prompt / seconds:,.0f}"
            f" prompt and {self.generated / seconds:,.0f} generated tokens/s in {seconds:,.0f} s"
        )
        if here > 0 and self.done < self.total:
            text += f"; about {(self.total - self.done) * seconds / here:,.0f} s left"
        return text


def _tokens(usage: dict[str, Any], *names: str) -> int:
    """What is counted under the first of `names` that `usage` has; 0 if that is no count."""
    count = next((usage[name] for name in names if name in usage), 0)
    return count if type(count) is int and 0 <= count < _MOST_TOKENS else 0


def run(args: argparse.Namespace) -> int:
    """Does what the command line asks; returns its exit code.

    Raises:
        ToolError: it cannot be done as asked.
    """
    if (args.model is None) == (args.base_url is None):
        raise ToolError("name either MODEL, to serve it, or --base-url, of a running server")
    if args.serve_args and args.base_url is not None:
        raise ToolError(f"a running server takes no flags: {' '.join(args.serve_args)}")
    batch, path = Path(args.batch), Path(args.answers)
    if path.exists() and batch.exists() and path.samefile(batch):
        raise ToolError(f"{path} is the batch itself: name another file for the answers")
    try:
        with batch.open("rb"):
            pass
    except OSError as error:
        raise ToolError(f"{batch}: {error.strerror}") from error
    answers = Answers(path)
    try:
        total = answers.check(batch, args.retry_errors)
        progress = Progress(total, len(answers.done))
        # Before hours of work, not after.
        _write_summary(args.summary, progress)
        if args.retry_errors:
            _say(f"{len(answers.again):,} lines whose answer is an error are asked again")
        if progress.done == progress.total:
            answers.drop_errors()
            _say(f"{progress.total:,} lines, all answered already in {path}")
            return 0
        with _transport(args) as (url, transport):
            # Not before there is a server that can be asked.
            answers.drop_errors()
            progress.began = time.monotonic()
            client = httpx.AsyncClient(
                base_url=url, transport=transport, timeout=_TIMEOUT, headers=_headers()
            )
            return asyncio.run(_run(args, client, batch, answers, progress))
    finally:
        answers.close()


@contextmanager
def _transport(args: argparse.Namespace) -> Iterator[tuple[str, httpx.AsyncHTTPTransport]]:
    """The server's address, and how it is reached."""
    limits = httpx.Limits(max_connections=args.concurrency + 1)
    if args.base_url is not None:
        url = args.base_url.rstrip("/").removesuffix("/v1")
        try:
            # By the same way as the requests: not by a proxy that the environment names.
            with httpx.Client(transport=httpx.HTTPTransport(), timeout=30) as client:
                health = client.get(f"{url}/health", headers=_headers())
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise ToolError(f"no server answers at {url}: {error}") from error
        if not is_well(health):
            page = " with a page" if health.status_code == 200 else ""
            raise ToolError(
                f"no vLLM is ready there: {url}/health answers {health.status_code}{page}"
            )
        yield url, httpx.AsyncHTTPTransport(limits=limits, socket_options=_KEEPALIVE)
        return
    with own_server(args.model, args.serve_args) as path:
        yield "http://server", httpx.AsyncHTTPTransport(uds=str(path), limits=limits)


def _write_summary(path: str | None, progress: Progress) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(progress.as_json(), indent=1) + "\n")
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror}") from error


def _headers() -> dict[str, str]:
    """As vLLM's server and OpenAI's client, which take the key from variables."""
    headers = {"Content-Type": "application/json"}
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
        if key := os.environ.get(name):
            if not (key.isascii() and key.isprintable()):
                raise ToolError(f"{name} holds what no header may, such as a line feed")
            return headers | {"Authorization": f"Bearer {key}"}
    return headers


async def _run(
    args: argparse.Namespace,
    client: httpx.AsyncClient,
    batch: Path,
    answers: Answers,
    progress: Progress,
) -> int:
    asking = _Asking(client, answers, progress)
    beside = [
        asyncio.create_task(_every(SYNC_S, answers.sync)),
        asyncio.create_task(_every(args.progress, lambda: _say(str(progress)))),
    ]
    ended: Exception | None = None
    try:
        async with client:
            await asking.ask_all(batch, args.concurrency)
        answers.sync()
    except* (ServerGoneError, ToolError, OSError) as failures:
        ended = failures.exceptions[0]
    finally:
        for task in beside:
            task.cancel()
    _write_summary(args.summary, progress)
    if isinstance(ended, ToolError):
        raise ended
    if ended is not None:
        why = f"{answers.path}: {ended.strerror}" if isinstance(ended, OSError) else ended
        _say(f"stopped: {why}. {progress}. The same command goes on from here.")
        return 1
    _say(f"{progress}. Answers: {answers.path}")
    return 0


class _Asking:
    """Asks for the answers that are missing, some at a time."""

    def __init__(self, client: httpx.AsyncClient, answers: Answers, progress: Progress) -> None:
        self.client = client
        self.answers = answers
        self.progress = progress

    async def ask_all(self, batch: Path, concurrency: int) -> None:
        """Every line of `batch` that is not done.

        Raises:
            ExceptionGroup: of ServerGoneError; of ToolError, where the server wants another key;
                of OSError, where an answer cannot be written.
        """
        free = asyncio.Semaphore(concurrency)

        async def ask(line: Line) -> None:
            try:
                await self.ask(line)
            finally:
                free.release()

        async with asyncio.TaskGroup() as tasks:
            for line in read_lines(batch):
                if line.number in self.answers.done:
                    continue
                if line.error is None and line.custom_id in self.answers.custom_ids:
                    # A later line, which was answered before this one was mended.
                    line = duplicate(line, "another line, answered already, has this custom_id too")
                if line.error is not None:
                    self.answers.add(error_line(line))
                    self.progress.add(400, None)
                    continue
                await free.acquire()
                tasks.create_task(ask(line))

    async def ask(self, line: Line) -> None:
        """Sends one request, again where the server is busy or fails, and writes its answer."""
        for attempt in count():
            reply: Reply | None = None
            try:
                reply = read_reply(line.url, await self.client.post(line.url, content=line.body))
                why = reply.why
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                said = str(error).rstrip(".") or type(error).__name__
                why = f"{self.client.base_url} cannot be reached: {said}"
            if reply is not None and reply.meaning is Meaning.ENDS_RUN:
                raise ToolError(why)
            if reply is not None and reply.meaning is Meaning.ANSWER:
                return self._write(line, reply)
            if attempt == len(RETRY_S):
                if (
                    reply is not None
                    and reply.meaning is Meaning.FAILURE
                    and await self._is_healthy()
                ):
                    # Time and again, from servers that are well: the request's own failure.
                    return self._write(line, reply)
                raise ServerGoneError(why)
            await asyncio.sleep(RETRY_S[attempt])
        return None

    async def _is_healthy(self) -> bool:
        """Whether the engine lives; asked a moment later, since its death takes one to be known."""
        await asyncio.sleep(RETRY_S[0])
        with suppress(httpx.HTTPError, httpx.InvalidURL):
            return is_well(await self.client.get("/health"))
        return False

    def _write(self, line: Line, reply: Reply) -> None:
        self.answers.add(answer_line(line, reply.status, reply.request_id, reply.body))
        self.progress.add(reply.status, reply.body)


async def _every(seconds: float, do: Any) -> None:
    while True:
        await asyncio.sleep(seconds)
        do()


def _say(text: str) -> None:
    print(f"vllm-kvx batch: {text}", file=sys.stderr, flush=True)
