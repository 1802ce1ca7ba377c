"""What comes too late for the prefix cache, and whether that is held against it."""

import itertools
from collections.abc import Iterator

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from vllm_kvx.cache import prefix_eviction
from vllm_kvx.cache.prefix_eviction import Recency, Rivals, forget


class Cache:
    """A pool with room for `size` prompts of `blocks` blocks in each of `groups` KV groups.

    hits: how many prompts were found. seconds: what its clock says.
    """

    def __init__(self, size: int, groups: int = 1, blocks: int = 1) -> None:
        # vLLM keeps one block for itself.
        self.pool = BlockPool(size * groups * blocks + 1, True, 16)
        self.groups, self.blocks, self.hits, self.seconds = list(range(groups)), blocks, 0, 0.0
        self.recency = Recency(self.pool, lambda: self.seconds)

    def late(self, name: str) -> Rivals | None:
        """What a prompt meets that finds nothing of its own."""
        needed = len(self.groups) * self.blocks
        return self.recency.too_late(_hashes(name, self.blocks)[0], [], needed)

    def ask(self, name: str) -> Rivals | None:
        """A prompt runs and ends; it stays in the cache. Returns what it met on the way."""
        hashes = _hashes(name, self.blocks)
        found = [self.pool.get_cached_block(each, self.groups) for each in hashes]
        if all(found):
            held = [block for place in found for block in place or []]
            self.hits += 1
            self.recency.begin_prompt(hashes, None)
            self.pool.touch(held)
            self.pool.free_blocks(reversed(held))
            return None
        # The parts of a prompt go together here: nothing of it is left.
        met = self.late(name)
        held = self.pool.get_new_blocks(len(self.groups) * self.blocks)
        keys = itertools.product(hashes, self.groups)
        for block, (each, group) in zip(held, keys, strict=True):
            key = make_block_hash_with_group_id(each, group)
            self.pool._insert_block_hash(key, block, num_tokens=16)
        is_strict = self.recency.is_strict
        # As in a server: the blocks of a prompt's first step have names by then.
        self.recency.begin_prompt(hashes, met)
        if met is not None and is_strict:
            forget(self.pool, held)
        self.pool.free_blocks(reversed(held))
        return met

    def has(self, names: str) -> str:
        return "".join(n for n in names if self.pool.get_cached_block(_hashes(n, 1)[0], [0]))

    def hits_in(self, names: Iterator[str] | list[str]) -> int:
        """How many of these prompts, asked one after the other, are found."""
        before = self.hits
        for name in names:
            self.ask(name)
        return self.hits - before


def _hash(name: str) -> BlockHash:
    return _hashes(name, 1)[0]


def _hashes(name: str, blocks: int) -> list[BlockHash]:
    return [BlockHash(f"{name} {place}".encode().ljust(32, b".")) for place in range(blocks)]


def sessions(count: int) -> list[str]:
    return [f"session {number}" for number in range(count)]


def test_what_was_never_there_is_not_late() -> None:
    cache = Cache(2)
    for name in "abc":
        assert cache.ask(name) is None
    assert cache.has("abc") == "bc"


def test_what_is_lost_is_late_if_all_was_used_since() -> None:
    cache = Cache(2)
    for name in "abc":
        cache.ask(name)
    assert cache.late("a") == Rivals(_hash("a"), _hash("b"))
    # Used before "a" went: it is colder than that.
    cache = Cache(2)
    for name in "abab":
        cache.ask(name)
    cache.ask("c")
    assert cache.late("a") == Rivals(_hash("a"), _hash("b"))
    assert cache.late("b") is None


def test_in_turns_the_first_stay() -> None:
    """Three in turn where two have room: vLLM would find none, and so do the first rounds here."""
    cache = Cache(2)
    assert cache.hits_in(list("abc" * 12)) >= 9
    assert cache.recency.is_strict


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("count", [52, 60])
def test_a_pool_of_any_number_of_groups_remembers_what_it_lost(groups: int, count: int) -> None:
    """As many keys as a pool of one group has blocks would be those that are cached.

    At best 49 of `count` stay where 50 have room, and one place serves all others.
    """
    cache = Cache(50, groups, blocks=3)
    cache.hits_in(sessions(count) * 4)
    assert cache.hits_in(sessions(count)) >= 45


def test_what_nobody_asks_for_any_more_goes() -> None:
    cache = Cache(2)
    cache.hits_in(list("abc" * 6 + "de" * 3))
    assert cache.has("abcde") == "de"


@pytest.mark.parametrize("groups", [1, 4])
def test_those_that_come_back_after_a_busy_time_are_kept(groups: int) -> None:
    """Of 60 sessions in turn 50 had room; then all end but those that were lost.

    Under LRU they are computed in the first turn and found from then on.
    """
    cache = Cache(50, groups, blocks=3)
    cache.hits_in(sessions(60) * 5)
    assert cache.recency.is_strict
    lost = [name for name in sessions(60) if not cache.pool.get_cached_block(_hash(name), [0])]
    assert len(lost) >= 9
    assert [cache.hits_in(lost) for _ in range(3)] == [0, len(lost), len(lost)]


def test_every_question_counts() -> None:
    """One block may have stood in the way of several: each of them answers."""
    cache = Cache(2)
    recency = cache.recency
    for _ in range(3):
        recency.begin_prompt([], Rivals(_hash("a"), _hash("dead")))
        recency.begin_prompt([_hash("dead")], None)
    assert recency.is_strict
    for name in "abc":
        recency.begin_prompt([], Rivals(_hash(name), _hash("dead")))
    for name in "abc":
        recency.begin_prompt([_hash(name)], None)
    assert not recency.is_strict


def test_what_is_asked_for_first_decides() -> None:
    cache = Cache(2)
    recency = cache.recency
    recency.begin_prompt([], Rivals(_hash("a"), _hash("b")))
    recency.begin_prompt([_hash("b")], None)
    assert recency.is_strict
    for _ in range(3):
        recency.begin_prompt([], Rivals(_hash("a"), _hash("b")))
        recency.begin_prompt([_hash("a")], None)
    assert not recency.is_strict
    # Answered once, and both at once count for the cache.
    recency.begin_prompt([_hash("b")], None)
    assert not recency.is_strict


def test_after_a_night_nothing_is_held_against_anybody() -> None:
    cache = Cache(2)
    cache.hits_in(list("abc" * 6))
    assert cache.recency.is_strict
    cache.seconds += prefix_eviction._IDLE / 2
    cache.ask("a")
    assert cache.recency.is_strict
    cache.seconds += prefix_eviction._IDLE + 1
    cached = cache.has("abc")
    cache.ask(cached)  # All others were used before it.
    lost = min(set("abc") - set(cached))
    cache.ask(lost)
    assert cache.has(lost) and not cache.recency.is_strict


@pytest.mark.parametrize("groups", [1, 3])
def test_nothing_is_late_where_blocks_are_empty(groups: int) -> None:
    """Empty ones go first, so that nothing leaves the cache for what comes back."""
    cache = Cache(4, groups, blocks=2)
    for name in "abcde":
        cache.ask(name)
    assert cache.late("a") is not None
    # A prompt that is not kept leaves its blocks empty.
    held = cache.pool.get_new_blocks(groups * 2)
    cache.pool.free_blocks(held)
    assert cache.late("a") is None
    cache.ask("f")
    assert cache.late("a") is not None
    assert cache.recency._empty == 0


def test_a_lookup_looks_at_no_block_that_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of empty blocks stand before the coldest one in the pool's queue."""
    cache = Cache(3000)
    for name in ("a", "b"):
        cache.ask(name)
    cache.recency._lose(make_block_hash_with_group_id(_hash("a"), 0))
    queue = cache.pool.free_block_queue
    for walk in ("iter_blocks_after", "get_all_free_blocks"):
        monkeypatch.setattr(queue, walk, lambda *_: pytest.fail("the queue is walked"))
    found = cache.recency.too_late(_hash("a"), [], 4000)
    assert found == Rivals(_hash("a"), _hash("b"))
    assert len(cache.recency._cached) == 1


def test_a_prompt_s_own_blocks_are_no_rivals() -> None:
    """It is about to use them: what would go for its rest is another's."""
    cache = Cache(3)
    for name in "abcd":
        cache.ask(name)
    own = cache.pool.get_cached_block(_hash("b"), [0]) or []
    found = cache.recency.too_late(_hash("a"), own, 1)
    assert found == Rivals(_hash("a"), _hash("c"))
    own += cache.pool.get_cached_block(_hash("c"), [0]) or []
    own += cache.pool.get_cached_block(_hash("d"), [0]) or []
    assert cache.recency.too_late(_hash("a"), own, 1) is None


def test_a_reset_forgets_what_was_used_and_asked() -> None:
    cache = Cache(2)
    cache.hits_in(list("abc" * 6))
    recency = cache.recency
    cached = cache.has("abc")
    cache.ask(cached)  # All others were used before it.
    lost = min(set("abc") - set(cached))
    recency.begin_prompt([], Rivals(_hash(lost), _hash("x")))
    assert cache.late(lost) is not None and recency.is_strict
    assert cache.pool.reset_prefix_cache()
    assert not recency.is_strict
    # Answers to what was asked before it say nothing of what is cached now.
    recency.begin_prompt([_hash("x")], None)
    assert not recency.is_strict
    for name in "de":
        cache.ask(name)
    assert cache.late(lost) is None


def test_it_remembers_as_much_as_the_pool_has() -> None:
    cache = Cache(2)
    for name in "abcdefgh":
        cache.ask(name)
    cache.late("f")
    assert cache.late("a") is None and cache.late("f") is not None
    recency, most = cache.recency, cache.pool.num_gpu_blocks
    for number in range(50):
        cache.ask(f"session {number}")
        cache.late("a")
    assert len(recency._cached) <= most and len(recency._lost) <= most


def test_what_others_hold_is_not_forgotten() -> None:
    cache = Cache(2)
    cache.ask("a")
    (block,) = cache.pool.get_cached_block(_hash("a"), [0]) or [KVCacheBlock(0)]
    cache.pool.touch([block])
    cache.pool.touch([block])
    forget(cache.pool, [block])
    assert cache.has("a") == "a"
    cache.pool.free_blocks([block])
    forget(cache.pool, [block])
    assert cache.has("a") == ""
