"""Servers in situations that random traffic hardly ever brings about."""

from dataclasses import replace
from pathlib import Path

from vllm.v1.core.kv_cache_utils import BlockHash

from simulation.client import AMPLE, Client
from simulation.servers import SERVERS
from simulation.traffic import VOCAB
from vllm_kvx.cache.prefix_eviction import Rivals

FIER = "fier-64:dense_below=0"


def test_resumes_behind_a_prefix_of_the_same_step(tmp_path: Path, one_thread: None) -> None:
    """The only token that a request has left retrieves from what another computes meanwhile.

    Its prompt is whole blocks, all of which are the other's prefix. Sidecars of these blocks are
    written after the step, unless beside each layer.
    """
    server = SERVERS["fier"]
    case = replace(AMPLE, shares_prefixes=True, max_chunk=64)
    client = Client(server, server.config(tmp_path), case)
    prefix = [number % VOCAB for number in range(2 * server.block_size)]
    client.send("computes", FIER, [*prefix, *[1] * 100])
    client.send("resumes", FIER, prefix, answer=10)
    client.step()
    assert list(client.began) == ["computes", "resumes"]
    client.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    hits = client.engine.worker.counts["prefix hits"]
    client.step()
    assert client.engine.worker.counts["prefix hits"] == hits + 1
    client.order()
    assert client.engine.worker.counts["retrieved"]


def test_a_pool_of_any_size_runs_a_prompt_again(tmp_path: Path, one_thread: None) -> None:
    """Upper layers take half of the prompt at once, in the step that may keep it in the cache."""
    half = "fastkv:tsp_layer=3,window=3,tsp_rate=0.5,kv_rate=0.5,kv_floor=0"
    server = replace(SERVERS["fastkv"], policy=half, layout=())
    config, prompt = server.config(tmp_path), [number % VOCAB for number in range(64)]
    kept = []
    # From what vLLM asks for at start to plenty.
    for num_blocks in range(server.num_groups * 32 + 2, 130, 5):
        case = replace(AMPLE, shares_prefixes=True, max_batch=24, num_blocks=num_blocks)
        client = Client(server, config, case)
        for name in ("first", "second"):
            client.send(name, half, prompt)
            client.order()
        assert not client.engine.preempted
        kept.append(client.engine.worker.counts["prefix hits"])
    assert kept[-1] == 1 and sorted(kept) == kept


def test_sharing_preempts_nobody_who_would_have_run_cold(tmp_path: Path, one_thread: None) -> None:
    """A prompt that is compacted while another reads its blocks needs copies of them.

    There has to be room for these before anything else begins, in a pool that is short anyway.
    """
    half = "snapkv:window=3,kv_rate=0.5,kv_floor=0"
    server = replace(SERVERS["fastkv"], policy=half, layout=(), stash=0)
    config, text = server.config(tmp_path), [(7 * n + n // 5) % VOCAB for n in range(120)]
    least = server.num_groups * 32 + 2

    def preempted(num_blocks: int, shares: bool) -> int:
        case = replace(AMPLE, shares_prefixes=shares, max_chunk=8, max_batch=32)
        client = Client(server, config, replace(case, num_blocks=num_blocks))
        client.send("is compacted", half, text, answer=4)
        client.step(2)
        client.send("joins", "full", text[:66], answer=24)
        client.send("other", "full", [1] * 60, answer=16)
        client.order()
        assert bool(client.engine.worker.counts["prefix hits"]) == shares
        return client.engine.preempted

    cold, shared = ([preempted(n, s) for n in range(least, 50, 2)] for s in (False, True))
    assert sum(shared) > 0
    assert all(s <= c for s, c in zip(shared, cold, strict=True)), (shared, cold)


def test_prompts_that_end_together_copy_one_by_one(tmp_path: Path, one_thread: None) -> None:
    """Who is compacted first holds the shared blocks until the next step."""
    half = "snapkv:window=3,kv_rate=0.5,kv_floor=0"
    server = replace(SERVERS["fastkv"], policy=half, layout=(), stash=0)
    config = server.config(tmp_path)
    text, other = ([(a * n + n // 5) % VOCAB for n in range(120)] for a in (7, 5))
    for num_blocks in range(60, 84, 4):
        case = replace(AMPLE, shares_prefixes=True, max_chunk=8, max_batch=32)
        client = Client(server, config, replace(case, num_blocks=num_blocks))
        client.send("first", half, text, answer=8)
        client.step(2)
        client.send("joins", half, [*text[:60], *other[60:116]], answer=8)
        client.order()
        assert client.engine.worker.counts["prefix hits"] == 1
        assert not client.engine.preempted, num_blocks


def test_states_are_held_only_where_the_prompt_fits_beside_them(
    tmp_path: Path, one_thread: None
) -> None:
    """Held blocks are not free: a prompt that waited for them to be would wait for ever.

    The first prompt leaves more states than a longer one, which keeps nearly all, has room for.
    """
    few, most = (
        f"fastkv:tsp_layer=3,window=3,kv_floor=0,tsp_rate={rate},kv_rate={rate}"
        for rate in (0.2, 0.99)
    )
    server = replace(SERVERS["fastkv"], policy=few, layout=(most,))
    config = server.config(tmp_path)
    prompt = [(7 * n + n // 5) % VOCAB for n in range(server.max_len - 4)]
    least = server.num_groups * -(-server.max_len // server.block_size) + 2
    case = replace(AMPLE, shares_prefixes=True, max_batch=24, num_blocks=least)
    client = Client(server, config, case)
    client.send("short", few, prompt[:110])
    client.order()
    client.send("long", most, prompt)
    assert client.order() == ["short", "long"]
    assert client.engine.worker.counts["prefix hits"] == 1 and not client.engine.preempted


def test_no_states_are_kept_of_a_part_that_is_not(tmp_path: Path, one_thread: None) -> None:
    """Nobody could read them: entries of the same tokens are gone."""
    policy = SERVERS["fastkv"].policy
    server = replace(SERVERS["fastkv"], layout=())
    prompt = [(7 * n + n // 5) % VOCAB for n in range(100)]

    def cached(comes_late: bool) -> int:
        case = replace(AMPLE, shares_prefixes=True, max_batch=24)
        client = Client(server, server.config(tmp_path), case)
        scheduler = client.engine.scheduler
        recency, pool = scheduler.sharing.recency, scheduler.kv_cache_manager.block_pool
        if comes_late:
            rivals = Rivals(BlockHash(b"lost"), BlockHash(b"coldest"))
            recency.too_late = lambda *_: rivals
            recency._balance = 1
        client.send("alone", policy, prompt)
        client.order()
        return len(pool.cached_block_hash_to_block)

    assert cached(comes_late=False) > 0
    assert cached(comes_late=True) == 0
