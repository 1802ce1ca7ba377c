"""Answers of a running server, in the form that engines in tests give them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch

from support.engine import Answer


def ask_server(
    url: str, prompts: Sequence[list[int]], policies: Sequence[str], max_tokens: int
) -> list[Answer]:
    """Greedy answers of exactly `max_tokens` tokens to all prompts at once."""
    common: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
    }
    with httpx.Client(base_url=url, timeout=300) as http:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]

        def ask(asked: tuple[list[int], str]) -> Answer:
            prompt, policy = asked
            body = {"model": model, "prompt": prompt, "vllm_xargs": {"kv_policy": policy}}
            reply = http.post("/v1/completions", json=common | body)
            assert reply.status_code == 200, reply.text
            found = reply.json()["choices"][0]["logprobs"]
            tokens = [int(token.removeprefix("token_id:")) for token in found["tokens"]]
            return Answer(prompt, tokens, torch.tensor(found["token_logprobs"]), 0)

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ask, zip(prompts, policies, strict=True)))
