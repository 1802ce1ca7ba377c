"""Adapters in the simulation: who reads whose prompt, and how many run at once."""

from dataclasses import replace
from pathlib import Path

import pytest
from support import inside

from simulation.client import AMPLE, Client
from simulation.hybrids import EVERY
from simulation.traffic import VOCAB

PROMPT_LEN = 69
# By server, the policies whose prompts come back: entries of all layers, entries below a cut with
# those of anchors above it, and hidden states, of tokens or of blocks.
SNAP = "snapkv:kv_floor=0,window=3"
POLICIES = {
    "fastkvadapters": {
        "full": 1,
        SNAP: 3,
        "speed-4": 1,
        "fastkv:tsp_layer=3,window=3,kv_floor=0": 0,
        "structkv:pivot=5,kv_floor=0,window=3": 0,
    },
    "blockadapters": {"structkv:pivot=3,window=3,granularity=block,kv_floor=0": 0},
    "statesadapters": {"full": 1},
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_is_read_under_its_adapter_alone(
    name: str, tmp_path: Path, one_thread: None
) -> None:
    """Every reader finds all that its own adapter left, and nothing that another one left."""
    server = replace(EVERY[name], max_prompt=PROMPT_LEN)
    case = replace(AMPLE, shares_prefixes=True, num_blocks=20_000)
    client = Client(server, server.config(tmp_path), case)
    number = 0
    for policy, own in POLICIES[name].items():
        grain = inside.state_tokens(client.engine) if own == 0 else server.block_size
        # Hidden states come back up to the window.
        limit = (PROMPT_LEN - (own or 3)) // grain * grain
        for writer in range(3):
            number += 1
            prompt = [*(number // VOCAB**power % VOCAB for power in range(4)), *[0] * 65]
            for reader in (writer, *({0, 1, 2} - {writer})):
                for turn in ("first", "again"):
                    request = f"{policy}, {writer}, {reader}, {turn}"
                    client.send(request, policy, prompt, answer=3, adapter=reader)
                    client.order()
                    cached = client.engine.worker.began_at[request]
                    assert cached == (limit if turn == "again" else 0), request
