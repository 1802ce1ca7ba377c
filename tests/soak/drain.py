"""A server that is asked to end while it answers."""

import os
import random
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.common.server import log_tail
from soak.client import ask, body, run_alone, short_turn
from soak.plan import Comparison, Turn
from soak.processes import engine_of, is_asked_to_end, stopped, tree

SEED = 4
# What a server that drains gives its answers at most; those here take a part of it.
DRAIN_S = 120
FLAGS = ["--shutdown-timeout", str(DRAIN_S)]
# Tokens of an answer. All have to have begun before the first ends: where this machine is too busy
# for the short ones, longer ones follow.
ANSWERS = (160, 320, 640, 1280, 1280, 1280)
MAX_LEN = 2048


@dataclass
class Stream:
    """An answer, and what came of it by now."""

    turn: Turn
    received: list[int] = field(default_factory=list)
    answer: "Future[list[int] | None]" = field(init=False)


def end_by_sigterm(url: str, log: Path, last: str = "speed-4") -> dict[str, int]:
    """As in an update: what streams is answered to its end, nothing new is, and the server goes.

    The server at `url`, whose log is given, serves `client.MODEL` under `speed-4`, with `FLAGS`.

    Args:
        last: the third request's policy; one that retrieves slows the others' steps.

    Returns:
        What happened, for the soak's figures.
    """
    rng = random.Random(SEED)
    turns = [short_turn(rng) for _ in range(3)]
    for turn, policy in zip(turns, ("speed-4", "full", last), strict=True):
        turn.policy, turn.abort_after, turn.adds = policy, None, turn.prompt

    def is_answered(http: httpx.Client) -> bool:
        """Whether a request that comes now is; vLLM's refusal may be an answer that is aborted."""
        try:
            reply = http.post("/v1/completions", json=body(turns[0]) | {"max_tokens": 1})
        except httpx.TransportError:
            return False
        assert reply.status_code == 200 or reply.status_code >= 500, reply.text
        if reply.status_code != 200:
            return False
        (choice,) = reply.json()["choices"]
        assert (choice["finish_reason"] == "abort") == (not choice["token_ids"]), choice
        return choice["finish_reason"] != "abort"

    pids = tree(url)
    with httpx.Client(base_url=url, timeout=300) as http, ThreadPoolExecutor(3) as pool:
        for length in ANSWERS:
            streams = _begun(http, pool, turns, length, log)
            # None of them ends before the engine heeds the signal, however late that comes.
            with stopped(engine_of(pids)) as engine:
                if num_streaming := _num_streaming(http, streams):
                    os.kill(pids[0], signal.SIGTERM)
                    asked_to_end = time.monotonic()
                    while not is_asked_to_end(engine):
                        assert time.monotonic() < asked_to_end + DRAIN_S, log_tail(log)
                        time.sleep(0.01)
                    break
        assert num_streaming, "every answer was there before the signal: nothing was shown"
        while is_answered(http):
            assert not all(each.answer.done() for each in streams), "new requests are answered"
        compared = Comparison()
        for each in streams:
            tokens = each.answer.result()
            assert tokens is not None and len(tokens) == each.turn.max_tokens, log_tail(log)
            compared.add(each.turn, tokens)
    end = asked_to_end + DRAIN_S
    while tree(url):
        assert time.monotonic() < end, f"the server stays: {log_tail(log)}"
        time.sleep(0.2)
    assert not compared.mismatches, "\n".join(compared.mismatches)
    return {
        "streams": len(turns),
        "streaming_at_sigterm": num_streaming,
        "equal": compared.equal,
        "near_ties": compared.near_ties,
        "mismatches": len(compared.mismatches),
        "seconds": round(time.monotonic() - asked_to_end),
    }


def _begun(
    http: httpx.Client, pool: ThreadPoolExecutor, turns: Sequence[Turn], length: int, log: Path
) -> list[Stream]:
    """Answers of so many tokens to all turns at once, each of which has a token by now."""
    for turn in turns:
        turn.max_tokens, turn.gaps = length, []
    run_alone(http, [[turn] for turn in turns])
    streams = [Stream(turn) for turn in turns]
    for each in streams:
        each.answer = pool.submit(ask, http, each.turn, each.received)
    for each in streams:
        while not each.received:
            assert not each.answer.done() or each.received, (each.answer.exception(), log_tail(log))
            time.sleep(0.002)
    return streams


def _num_streaming(http: httpx.Client, streams: Sequence[Stream]) -> int:
    """How many of a stopped engine's answers have not ended, once all that it sent has come."""
    before: list[int] = []
    while before != (now := [len(each.received) for each in streams]):
        before = now
        # The server's front, through which tokens come, has been at work since.
        http.get("/version").raise_for_status()
        time.sleep(0.02)
    return sum(not each.answer.done() for each in streams)
