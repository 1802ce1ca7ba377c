"""Drafted tokens beside policies, in situations that random traffic hardly reaches."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from simulation.client import AMPLE, Client
from simulation.drafting import DRAFTING
from simulation.traffic import VOCAB

PROMPT = [(7 * n + n // 5) % VOCAB for n in range(70)]
FULL, SNAP = "full", "snapkv:window=1,kv_rate=0.5,kv_floor=0"


@pytest.mark.parametrize("policy", [FULL, SNAP])
def test_a_prompt_with_one_token_left_is_padded_with_drafts(
    policy: str, tmp_path: Path, one_thread: None
) -> None:
    """vLLM pads a prompt of which one token is left, so that the step is as long for everybody.

    Where entries go at the prompt's end, the chunk ends there all the same.
    """
    server = DRAFTING["shareddrafts"]
    client = Client(server, server.config(tmp_path), replace(AMPLE, shares_prefixes=True))
    client.send("runs", FULL, PROMPT[:41], answer=20)
    client.step(2)
    client.send("has one token left", policy, PROMPT[:41])
    client.order()
    counts = client.engine.worker.counts
    assert counts["prefix hits"] == 1 and counts["padded"] == (policy == FULL)


@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_rejections_at_every_place_of_a_group(
    drafts: int, tmp_path: Path, one_thread: None
) -> None:
    """Whatever stays of its drafts, a request resumes from what it had."""
    server = replace(DRAFTING["fierdrafts"], drafts=drafts)
    config, counts = server.config(tmp_path), Counter[str]()
    for length in range(60, 70):
        client = Client(server, config, AMPLE)
        client.send("drafts", "fier-64:dense_below=0", PROMPT[:length], answer=60)
        client.step(8)
        client.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        client.order()
        counts += client.engine.worker.counts
    assert counts["drafts kept"] and counts["drafts rejected"] and counts["retrieved"]
    assert counts["resumed"] == 10
