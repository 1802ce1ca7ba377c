"""Blocks held and saved, of requests that share a prefix, without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvx.cache import scheduler_stats
from vllm_kvx.cache.kv_cache_specs import FirstStageAttentionSpec, LaterStageAttentionSpec
from vllm_kvx.cache.later_stage_manager import LaterStageKVCacheManager
from vllm_kvx.cache.managers import FirstStageKVCacheManager
from vllm_kvx.cache.request_kv import RequestKV
from vllm_kvx.cache.scheduler_stats import PolicySchedulerStats, RunInFull
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.storage import storage_of

BLOCK, POOL, LAYERS = 4, 140, 8
PREFIX, PROMPT = 100, 110  # 25 blocks are shared; three are a request's own.
SPEED, OTHER = "speed-4", "speed-4:tail=3"


class Server:
    """A pool with one KV group in each of two stages, and requests that hold blocks of it."""

    def __init__(self) -> None:
        self.pool = BlockPool(POOL + 1, enable_caching=True, hash_block_size=BLOCK)
        sizes: Any = dict(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        common: Any = dict(
            block_pool=self.pool,
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=BLOCK,
        )
        self.first_stage = FirstStageKVCacheManager(FirstStageAttentionSpec(**sizes), **common)
        spec = LaterStageAttentionSpec(**sizes, stage=1, start_layer=4)
        self.later_stage = LaterStageKVCacheManager(spec, **common)
        waits: Any = SimpleNamespace(stash_waits=2, stash_wait_seconds=0.5)
        settings = KVSettings.of({"kv_policy": SPEED, "kv_debug": True}, num_layers=LAYERS)
        self.stats = PolicySchedulerStats(
            settings,
            self.pool,
            [self.first_stage],
            [self.later_stage],
            waits,
        )
        self.requests: dict[str, Any] = {}

    def start(
        self,
        name: str,
        policy: str = SPEED,
        prefix: list[KVCacheBlock] | None = None,
        moves_out: bool = False,
    ) -> list[KVCacheBlock]:
        """Returns its blocks of the prefix; `prefix`: those that it takes over.

        moves_out: what retention keeps goes to new blocks.
        """
        for manager in (self.first_stage, self.later_stage):
            start = manager.start_layer
            parsed = parse_policy(policy)
            storage = storage_of(parsed, PROMPT, start, BLOCK, LAYERS)
            kv = RequestKV(storage, parsed, row=self.stats.row_of(policy), moves_out=moves_out)
            manager.add_request(name, kv)
        if prefix:
            self.first_stage.add_local_computed_blocks(name, prefix, PREFIX, 0)
            self.later_stage.add_local_computed_blocks(name, [], PREFIX, 0)
        for manager in (self.first_stage, self.later_stage):
            manager.allocate_new_blocks(name, PROMPT, PROMPT)
        self.requests[name] = SimpleNamespace(num_computed_tokens=PROMPT)
        return self.first_stage.req_to_blocks[name][: PREFIX // BLOCK]

    def compact(self, name: str) -> None:
        """After the step that brought its prompt in: what retention dropped is given back."""
        for manager in (self.first_stage, self.later_stage):
            self.pool.free_blocks(manager.shrink(name, PROMPT).values())

    def end(self, name: str) -> None:
        for manager in (self.first_stage, self.later_stage):
            manager.free(name)
            manager.remove_request(name)
        del self.requests[name]

    def blocks(self) -> tuple[dict[str, int], dict[str, int]]:
        """By policy: held and saved. What is held are the blocks that are not free."""
        told = self.stats.as_dict(self.requests)
        assert sum(told["held"].values()) == POOL - self.pool.get_num_free_blocks() <= POOL
        return told["held"], told["saved"]


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_shared_prefix_is_held_once(server: Server) -> None:
    """As many as 21 requests of 29 blocks each: more than the pool has, if each counted its own."""
    prefix = server.start("0")
    # The anchor and the tail fill a block above the cutoff.
    assert server.blocks() == ({SPEED: 28 + 1}, {SPEED: 28 - 1})
    for name in range(1, 21):
        server.start(str(name), prefix=prefix)
    assert POOL < 21 * 29
    held, saved = server.blocks()
    assert held == {SPEED: 25 + 21 * 4}
    assert saved == {SPEED: 2 * (25 + 21 * 3) - held[SPEED]}
    for name in range(21):
        server.end(str(name))
    assert server.blocks() == ({}, {})


def test_who_brought_a_block_in_counts_it(server: Server) -> None:
    """Until nobody holds it: the other policy's request, and then nobody's, and then its own."""
    prefix = server.start("a")
    server.start("b", OTHER, prefix)
    assert server.blocks() == ({SPEED: 29, OTHER: 4}, {SPEED: 27, OTHER: 2})
    server.end("a")
    assert server.blocks() == ({SPEED: 25, OTHER: 4}, {SPEED: 25, OTHER: 2})
    server.end("b")
    assert server.blocks() == ({}, {})
    # The prefix lies in the pool still, and is the next one's that takes it out.
    server.start("c", OTHER, prefix)
    assert server.blocks() == ({OTHER: 29}, {OTHER: 27})


def test_less_than_nothing_is_saved_while_a_prompt_is_compacted(server: Server) -> None:
    """The step that compacts it holds all of it, as stock does, and what stays of it besides."""
    policy = "snapkv:kv_rate=0.2,kv_floor=0"
    server.start("a", policy, moves_out=True)
    kept = 6  # Blocks of 22 entries, in each group.
    name = str(parse_policy(policy))
    assert server.blocks() == ({name: 2 * (28 + kept)}, {name: -2 * kept})
    server.compact("a")
    assert server.blocks() == ({name: 2 * kept}, {name: 2 * (28 - kept)})


def test_less_than_nothing_is_saved_where_stock_shares_more(server: Server) -> None:
    """Stock shares a prefix in all layers; above a cutoff each request has entries of its own."""
    policy = str(parse_policy("speed-4:anchors=8,tail=20"))
    prefix = server.start("0", policy)
    assert server.blocks() == ({policy: 28 + 7}, {policy: 28 - 7})
    for name in range(1, 10):
        server.start(str(name), policy, prefix)
    held = 25 + 10 * 3 + 10 * 7
    assert server.blocks() == ({policy: held}, {policy: 2 * (25 + 10 * 3) - held})
    assert held > 2 * (25 + 10 * 3)


def test_less_than_nothing_is_saved_of_a_prefix_that_is_another_policys(server: Server) -> None:
    """It counts where it was brought in, and so does what is saved of it; the sum is right."""
    prefix = server.start("a")
    policy = str(parse_policy("speed-4:anchors=8,tail=20"))
    server.start("b", policy, prefix)
    _, saved = server.blocks()
    assert saved == {SPEED: 28 - 1, policy: 2 * 3 - (3 + 7)}
    server.end("a")
    _, saved = server.blocks()
    assert saved == {SPEED: 25, policy: 2 * 3 - (3 + 7)}
    assert sum(saved.values()) == 2 * 28 - (28 + 7)


def test_stats_ride_when_there_is_news(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once what is counted; blocks every so often, and when nobody holds one any more."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def told() -> Any:
        return server.stats.news(server.requests)

    server.start("a")
    assert told()["held"] == {SPEED: 29}
    server.start("b")
    assert told() is None
    now[0] += scheduler_stats.EVERY_S
    assert told()["held"] == {SPEED: 58}
    server.stats.add_unshared(SPEED)
    server.stats.add_run_in_full(RunInFull.SESSION)
    news = told()
    assert news["unshared"] == {SPEED: 1} and news["held"] == {SPEED: 58}
    assert news["run_in_full"] == {"session": 1, "misfit": 0}
    assert (news["stash_waits"], news["stash_wait_seconds"]) == (2, 0.5)
    assert told() is None
    server.end("a")
    server.end("b")
    assert told()["held"] == {}


def test_debug_finds_blocks_that_nobody_counts(server: Server) -> None:
    server.start("a")
    server.pool.get_new_blocks(1)
    with pytest.raises(RuntimeError, match="30 KV blocks are not free, 29 are counted as held"):
        server.stats.as_dict(server.requests)
