"""A server's clients: they ask alone or under load, and leave."""

import json
import random
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from soak.plan import BLOCK, POLICIES, Turn

MODEL = "lookup"
# Policies that choose nothing of a short prompt: interpreted, scores take most of a request's time.
QUICK = [name for name in POLICIES if "_rate=" not in name]


def body(turn: Turn, salt: str | None = None) -> dict[str, Any]:
    name = MODEL if turn.adapter is None else f"adapter-{turn.adapter}"
    found = {"model": name, "prompt": turn.prompt, "temperature": 0, "ignore_eos": True}
    found |= {"max_tokens": turn.max_tokens, "return_token_ids": True, "logprobs": 2}
    found |= {"vllm_xargs": {"kv_policy": turn.policy}}
    return found | ({} if salt is None else {"cache_salt": salt})


def run_alone(http: httpx.Client, talks: list[list[Turn]]) -> None:
    """Fills in prompts and answers: one request at a time, and no prefix that another left."""
    for number, talk in enumerate(talks):
        said: list[int] = []
        for depth, turn in enumerate(talk):
            turn.prompt = said + turn.adds
            reply = http.post("/v1/completions", json=body(turn, f"alone-{number}-{depth}"))
            (choice,) = reply.raise_for_status().json()["choices"]
            turn.answer = choice["token_ids"]
            for top in choice["logprobs"]["top_logprobs"]:
                best, second = sorted(top.values(), reverse=True)[:2]
                turn.gaps.append(best - second)
            said = turn.prompt + turn.answer


def ask(http: httpx.Client, turn: Turn, received: list[int] | None = None) -> list[int] | None:
    """The tokens of the streamed answer; None if the client left before its end.

    `received` grows by them as they come.
    """
    tokens: list[int] = [] if received is None else received
    with http.stream("POST", "/v1/completions", json=body(turn) | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        if turn.abort_after == 0:
            return None
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens += choice["token_ids"] or []
            if turn.abort_after is not None and len(tokens) >= turn.abort_after:
                return None
    return tokens


def samples(http: httpx.Client, name: str) -> float:
    """A metric, added up over its labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == name
    )


def short_turn(rng: random.Random) -> Turn:
    """A prompt of random tokens, of one or two blocks, and an answer of a token or two."""
    policy = rng.choice(POLICIES if rng.random() < 0.2 else QUICK)
    turn = Turn([], policy, rng.randint(1, 2), 0 if rng.random() < 0.1 else None)
    turn.prompt = [rng.randint(10, 500) for _ in range(rng.randint(8, 2 * BLOCK))]
    return turn
