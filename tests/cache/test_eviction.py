"""What comes too late for the prefix cache, and whether that is held against it."""

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from vllm_kvx.cache.eviction import Recency, Rivals, forget


class Cache:
    """A pool of `size` blocks, and prompts of one block each, named by a letter."""

    def __init__(self, size: int) -> None:
        # vLLM keeps one block for itself.
        self.pool = BlockPool(size + 1, True, 16)
        self.recency = Recency(self.pool)

    def late(self, name: str) -> Rivals | None:
        return self.recency.too_late(_hash(name), [])

    def ask(self, name: str) -> Rivals | None:
        """A prompt runs and ends; it stays in the cache. Returns what it met on the way."""
        cached = self.pool.get_cached_block(_hash(name), [0])
        met = None if cached else self.late(name)
        self.recency.begin_prompt([_hash(name)], met)
        if cached:
            self.pool.touch(cached)
            blocks = cached
        else:
            blocks = self.pool.get_new_blocks(1)
            key = make_block_hash_with_group_id(_hash(name), 0)
            self.pool._insert_block_hash(key, blocks[0], num_tokens=16)
            if met is not None and self.recency.is_strict:
                forget(self.pool, blocks)
        self.pool.free_blocks(blocks)
        return met

    def has(self, names: str) -> str:
        return "".join(n for n in names if self.pool.get_cached_block(_hash(n), [0]))


def _hash(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32, b"."))


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
    cache, hits = Cache(2), 0
    for _ in range(12):
        for name in "abc":
            hits += bool(cache.has(name))
            cache.ask(name)
    assert cache.recency.is_strict
    # Of 36; under LRU none.
    assert hits >= 9


def test_what_nobody_asks_for_any_more_goes() -> None:
    cache = Cache(2)
    for _ in range(6):
        for name in "abc":
            cache.ask(name)
    for _ in range(20):
        for name in "de":
            cache.ask(name)
    assert cache.has("abcde") == "de"


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


def test_a_reset_forgets_what_was_used() -> None:
    cache = Cache(2)
    for name in "abc":
        cache.ask(name)
    assert cache.late("a") is not None
    assert cache.pool.reset_prefix_cache()
    cache.ask("d")
    assert cache.late("a") is None


def test_it_remembers_as_much_as_the_pool_has() -> None:
    cache = Cache(2)
    for name in "abcdefgh":
        cache.ask(name)
    assert cache.late("a") is None and cache.late("f") is not None


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
