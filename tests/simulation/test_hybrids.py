"""Windows and states beside policies, in situations that random traffic hardly reaches."""

from dataclasses import replace
from pathlib import Path

import pytest
from support import inside

from simulation.client import AMPLE, Client
from simulation.hybrids import HYBRIDS
from simulation.traffic import VOCAB

SNAP = "snapkv:window=3,kernel=3,kv_rate=0.4,kv_floor=0"
PROMPT_LEN = 69
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


_SNAP, _SPEED_5 = "snapkv:window=3,kv_rate=0.4,kv_floor=0", "speed-5:anchors=3,tail=2"
_FAST_4, _FAST_8 = (
    f"fastkv:window=3,kernel=3,kv_floor=0,tsp_layer={layer},tsp_rate=0.4" for layer in (4, 8)
)
_STRUCT_8 = "structkv:kv_floor=0,window=3,pivot=8,kv_rate=0.4"
_GEM_4 = "gemfilter:kv_floor=0,window=3,kernel=3,layer=4,rate=0.4"
# By server and reader, the last prompt tokens that it computes itself, and the writers whose
# prompts it can read. Windows are there where the layers around them are.
READS: dict[str, dict[str, tuple[int, set[str]]]] = {
    "slidingspeed": {
        "full": (1, {"full"}),
        "speed-9:anchors=0": (1, {"full", "speed-9:anchors=0"}),
        "speed-5:anchors=0": (1, {"full", "speed-9:anchors=0", "speed-5:anchors=0", _SPEED_5}),
        _SPEED_5: (2, {"full", _SPEED_5}),
    },
    "slidingfastkv": {
        "full": (1, {"full", _SNAP}),
        _SNAP: (3, {"full", _SNAP}),
        "speed-9:anchors=0": (1, {"full", _SNAP, "speed-9:anchors=0", _FAST_8, _STRUCT_8}),
        _FAST_4: (3, {_FAST_4}),
        _FAST_8: (3, {_FAST_8, _STRUCT_8}),
        _STRUCT_8: (3, {_FAST_8, _STRUCT_8}),
        _GEM_4: (3, set()),
    },
}


@pytest.mark.parametrize("keeps_all", [True, False], ids=["every window", "some windows"])
@pytest.mark.parametrize("name", READS)
def test_who_reads_whom_where_layers_slide(
    name: str, keeps_all: bool, tmp_path: Path, one_thread: None
) -> None:
    """Every pair; where vLLM keeps some windows alone, a policy finds those of its own prompts."""
    server = replace(HYBRIDS[name], max_prompt=PROMPT_LEN)
    case = replace(AMPLE, shares_prefixes=True, num_blocks=20_000, copies_pages=not keeps_all)
    assert (case.retention_interval is None) == keeps_all
    client, prompts = Client(server, server.config(tmp_path), case), 0
    for reader, (own, writers) in READS[name].items():
        selects = reader in (_FAST_4, _FAST_8, _STRUCT_8)
        grain = inside.state_tokens(client.engine) if selects else server.block_size
        for writer in READS[name] if keeps_all else [reader]:
            # No two have their first block in common.
            start = [prompts // VOCAB**power % VOCAB for power in range(server.block_size)]
            prompt = [*start, *[0] * (PROMPT_LEN - len(start))]
            prompts += 1
            for who, policy in (("writes", writer), ("reads", reader)):
                client.send(f"{prompts} {who}", policy, prompt, answer=3)
                client.until_begun(f"{prompts} {who}")
                client.step(4)
            cached = client.engine.worker.began_at[f"{prompts} reads"]
            limit = (PROMPT_LEN - own) // grain * grain
            assert cached == (limit if writer in writers else 0), f"{reader} after {writer}"
    client.order()


def test_what_retention_waits_for_may_end_within_a_block(tmp_path: Path, one_thread: None) -> None:
    """A request that comes in again has a longer answer: a chunk ends there all the same."""
    server = HYBRIDS["fierstates"]
    client = Client(server, server.config(tmp_path), replace(AMPLE, shares_prefixes=True))
    policy = "snapkv:window=3,kernel=3,kv_floor=0,kv_rate=0.6,after=9+fier-64:dense_below=0"
    client.send("resumes", policy, PROMPT[:64], answer=60)
    client.step(50)
    client.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    client.order()
    counts = client.engine.worker.counts
    assert counts["resumed"] == 1 and counts["compacted"] == 16
