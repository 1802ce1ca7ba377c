"""Windows and states beside policies, in situations that random traffic hardly reaches."""

from dataclasses import replace
from pathlib import Path

import pytest

from simulation.client import AMPLE, Client
from simulation.hybrids import HYBRIDS
from simulation.traffic import VOCAB

SNAP = "snapkv:window=3,kernel=3,kv_rate=0.4,kv_floor=0"
PROMPT = [(7 * n + n // 5) % VOCAB for n in range(70)]


def test_a_prompt_that_ends_inside_of_a_block_comes_in_again(
    tmp_path: Path, one_thread: None
) -> None:
    """States are kept where blocks end; entries go where the prompt does, and answers follow."""
    server = HYBRIDS["states"]
    client = Client(server, server.config(tmp_path), replace(AMPLE, shares_prefixes=True))
    client.send("resumes", SNAP, PROMPT[:18], answer=24)
    client.step(14)
    client.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    client.order()
    assert client.engine.worker.counts["resumed"] == 1


@pytest.mark.parametrize("max_batch", [4, 5])
def test_a_chunk_may_end_in_the_window_where_no_block_ends_before_it(
    max_batch: int, tmp_path: Path, one_thread: None
) -> None:
    """The last block begins 3 tokens before the window and ends in it; a step takes no more."""
    server = HYBRIDS["states"]
    case = replace(AMPLE, shares_prefixes=True, max_batch=max_batch)
    client = Client(server, server.config(tmp_path), case)
    client.send("ends", SNAP, PROMPT[:18], answer=3)
    client.order()
    assert client.engine.worker.counts["split windows"]


@pytest.mark.parametrize("name", ["windows", "states"])
def test_nobody_reads_what_a_lossy_answer_left(name: str, tmp_path: Path, one_thread: None) -> None:
    """Where an answer's tokens come as a prompt, the cache has two windows, or states, of them.

    Those of the answer were computed over what its policy had left of the prompt.
    """
    server = HYBRIDS[name]
    client = Client(server, server.config(tmp_path), replace(AMPLE, shares_prefixes=True))
    client.send("answers", SNAP, PROMPT[:40], answer=24)
    client.order()
    text = client.engine.worker.finished[-1].tokens[:60]
    for who in ("asks on", "asks again"):
        client.send(who, "full", [*text, 1], answer=2)
        client.order()
    assert client.engine.worker.began_at["asks again"] == 60


@pytest.mark.parametrize("policy", [SNAP, "full"])
def test_a_prefix_in_common_is_kept_once_it_is_seen_to_be(
    policy: str, tmp_path: Path, one_thread: None
) -> None:
    """States are kept where chunks end: the first prompt has none where the second parts from it.

    The second one ends a chunk there, as under stock vLLM, and the third one finds it.
    """
    server = HYBRIDS["states"]
    client = Client(server, server.config(tmp_path), replace(AMPLE, shares_prefixes=True))
    for number, name in enumerate(("first", "second", "third")):
        client.send(name, policy, [*PROMPT[:24], *[number] * 30], answer=2)
        client.order()
    began_at = client.engine.worker.began_at
    assert [began_at[name] for name in ("first", "second", "third")] == [0, 0, 24]


def test_nobody_reads_a_checkpoint_of_a_lossy_answer(tmp_path: Path, one_thread: None) -> None:
    """A request that comes in again may take prompt and answer in one chunk.

    It keeps a state within that chunk, where the last block ends: in the answer.
    """
    server = HYBRIDS["fiercheckpoints"]
    client = Client(server, server.config(tmp_path), replace(AMPLE, shares_prefixes=True))
    client.send("answers", "fier-64:dense_below=0", [*PROMPT, *PROMPT[:30]], answer=60)
    client.step(45)
    client.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    client.order()
    counts = client.engine.worker.counts
    assert counts["resumed"] == 1 and counts["checkpoints"]
    text = client.engine.worker.finished[-1].tokens[:130]
    for who in ("asks on", "asks again"):
        client.send(who, "full", [*text, 1], answer=2)
        client.order()
    assert client.engine.worker.began_at["asks again"] == 128
