"""Two servers, of which one goes on with what the other has left of prompts, in odd situations."""

import json
import random
from dataclasses import replace
from pathlib import Path

from vllm.v1.request import Request

from simulation.client import AMPLE
from simulation.handing_over import Pair
from simulation.hybrids import EVERY
from simulation.server import Server
from simulation.traffic import VOCAB, Traffic
from vllm_kvx.config.handed_over import HOLDS


def _request(name: str, server: Server, policy: str, length: int) -> Request:
    """A prompt of so many tokens, for an answer of four."""
    one = replace(server, requests=(policy,), repeats=0.0)
    traffic = Traffic(one, False, random.Random(0))
    request = traffic.draw([])
    request.request_id = name
    request.prompt_token_ids = [number % VOCAB for number in range(length)]
    assert request.sampling_params is not None
    request.sampling_params.max_tokens = 4
    return request


def test_a_prompt_that_does_not_come_waits_behind_those_that_hold_blocks(
    tmp_path: Path, one_thread: None
) -> None:
    """Nothing runs, and it needs more blocks than were to come: another one holds them.

    It came first, and vLLM begins nobody behind one that lacks blocks.
    """
    half = "snapkv:window=2,kv_rate=0.2,kv_floor=0"
    server = replace(EVERY["sharedhanded"], policy=half, layout=(), requests=(half, "full"))
    small = replace(AMPLE, num_blocks=server.num_groups * 32 + 2)
    pair = Pair(server, server.config(tmp_path), (AMPLE, small), random.Random(0))
    traffic = Traffic(server, False, random.Random(0))
    requests = [_request("fails", server, half, 64), _request("holds", server, "full", 80)]
    for request in requests:
        pair.first.add(traffic.passed_on(request, 1, {HOLDS: True}))
    while pair.first.live:
        pair.first.advance()
    for request in requests:
        told = json.loads(json.dumps(pair.first.ended[request.request_id]))
        pair.second.add(traffic.passed_on(request, 4, told))
    # Both loads end in one step, once both requests have got their blocks.
    requested = list(pair.second.live)
    scheduler = pair.second.scheduler
    pair.fetches.ends = lambda name: all(
        scheduler.requests[n].num_computed_tokens for n in requested
    )
    pair.fetches.fails = lambda name: name == "fails"
    pair.second.finish()
    pair.first.finish()
    assert len(pair.second.answers["fails"]) == len(pair.second.answers["holds"]) == 4
