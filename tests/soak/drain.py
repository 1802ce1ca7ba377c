"""A server that is asked to end while it answers."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx

from benchmarks.common.server import log_tail
from soak.client import ask, body, run_alone, short_turn, tree
from soak.plan import Comparison

SEED = 4
# What a server that drains gives its answers at most; those here take a part of it.
DRAIN_S = 120
FLAGS = ["--shutdown-timeout", str(DRAIN_S)]
# Tokens of an answer, which has to last for longer than the server takes to heed the signal.
ANSWER = 160


def end_by_sigterm(url: str, log: Path) -> dict[str, int]:
    """As in an update: what streams is answered to its end, nothing new is, and the server goes.

    The server at `url`, whose log is given, serves `client.MODEL` under `speed-4`, with `FLAGS`.

    Returns:
        What happened, for the soak's figures.
    """
    rng = random.Random(SEED)
    turns = [short_turn(rng) for _ in range(3)]
    for turn, policy in zip(turns, ("speed-4", "full", "speed-4"), strict=True):
        turn.policy, turn.max_tokens, turn.abort_after = policy, ANSWER, None
        turn.adds = turn.prompt

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
    with httpx.Client(base_url=url, timeout=100) as http, ThreadPoolExecutor(3) as pool:
        run_alone(http, [[turn] for turn in turns])
        starts = [Event() for _ in turns]
        answers = [pool.submit(ask, http, *pair) for pair in zip(turns, starts, strict=True)]
        for answer, began in zip(answers, starts, strict=True):
            while not began.wait(0.05):
                assert not answer.done(), (answer.exception(), log_tail(log))
        os.kill(pids[0], signal.SIGTERM)
        asked_to_end = time.monotonic()
        while is_answered(http):
            assert not all(answer.done() for answer in answers), "new requests are answered"
        num_streaming = sum(not answer.done() for answer in answers)
        compared = Comparison()
        for turn, answer in zip(turns, answers, strict=True):
            tokens = answer.result()
            assert tokens is not None and len(tokens) == turn.max_tokens, log_tail(log)
            compared.add(turn, tokens)
    end = asked_to_end + DRAIN_S
    while tree(url):
        assert time.monotonic() < end, f"the server stays: {log_tail(log)}"
        time.sleep(0.2)
    assert num_streaming, "every answer was there before the signal: nothing was shown"
    assert not compared.mismatches, "\n".join(compared.mismatches)
    return {
        "streams": len(turns),
        "streaming_at_sigterm": num_streaming,
        "equal": compared.equal,
        "near_ties": compared.near_ties,
        "mismatches": len(compared.mismatches),
        "seconds": round(time.monotonic() - asked_to_end),
    }
