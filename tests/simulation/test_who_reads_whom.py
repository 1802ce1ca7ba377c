"""Which policies' requests read a prompt that another's left in the prefix cache."""

from dataclasses import replace
from pathlib import Path

from support import inside

from simulation.client import AMPLE, Client
from simulation.servers import SERVERS

FAST, STRUCT = "fastkv:tsp_layer=3,window=3,kv_floor=0", "structkv:pivot=5,kv_floor=0,window=3"
SNAP, STREAM = "snapkv:kv_floor=0,window=3", "streamingllm:sinks=2,recent=6"
PROMPT = 69
WHOLE = {"full", SNAP, STREAM}  # Whose blocks hold all layers.
FOUR = {*WHOLE, FAST, f"{FAST},kv_rate=1", STRUCT, "speed-4", "speed-6", f"speed-4+{SNAP}"}
# By reader: the writers whose prompts it can read.
READS = {
    "full": WHOLE,
    SNAP: WHOLE,
    STREAM: WHOLE,
    # Layers 0 to 3; of those above the anchor's entries, which any prompt that begins so leaves.
    "speed-4": FOUR,
    f"speed-4+{SNAP}": FOUR,
    # Layers 4 and 5 too.
    "speed-6": {*WHOLE, STRUCT, "speed-6"},
    # States after layer 3, or after layer 5: of their own kind alone.
    FAST: {FAST, f"{FAST},kv_rate=1"},
    f"{FAST},kv_rate=1": {FAST, f"{FAST},kv_rate=1"},
    STRUCT: {STRUCT},
}
# Last prompt tokens that a request computes itself.
OWN = {"full": 1, STREAM: 1, "speed-4": 1, "speed-6": 1}


def test_who_reads_whom(tmp_path: Path, one_thread: None) -> None:
    """Every pair, each with a prompt of its own."""
    server = replace(SERVERS["fastkv"], max_prompt=PROMPT)
    case = replace(AMPLE, shares_prefixes=True, num_blocks=20_000)
    client = Client(server, server.config(tmp_path), case)
    tokens, prompts = inside.state_tokens(client.engine), 0
    for reader, writers in READS.items():
        for writer in READS:
            # No two have their first block in common.
            start = [prompts // 3**power % 3 for power in range(server.block_size)]
            prompt = [*start, *[0] * (PROMPT - len(start))]
            prompts += 1
            assert prompts <= 3**server.block_size
            names = [f"{prompts} writes", f"{prompts} reads"]
            for name, policy in zip(names, (writer, reader), strict=True):
                client.send(name, policy, prompt, answer=3)
                client.until_begun(name)
                cached = client.engine.worker.began_at[name]
                client.step(4)
            grain = tokens if reader in (FAST, f"{FAST},kv_rate=1", STRUCT) else server.block_size
            limit = (PROMPT - OWN.get(reader, 3)) // grain * grain
            assert 0 < limit <= PROMPT
            assert cached == (limit if writer in writers else 0), f"{reader} after {writer}"
    client.order()
