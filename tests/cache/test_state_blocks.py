"""Blocks of hidden states in the prefix cache."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from vllm_kvx.cache.kv_cache_specs import FirstStageAttentionSpec
from vllm_kvx.cache.states import StateCache, StateRows, overlays

BLOCK = 4
ROWS = StateRows(per_page=4, pages=2, tokens=8)


def hashes(name: str, tokens: int) -> list[BlockHash]:
    return [BlockHash(f"{name} {i}".encode()) for i in range(tokens // BLOCK)]


def test_no_block_is_filled_twice_in_a_step() -> None:
    """The pool has one block: the second prompt of the step gets none, and reads what it held."""
    pool = BlockPool(2, enable_caching=True, hash_block_size=BLOCK)
    cache = StateCache(pool, ROWS, BLOCK)
    first = cache.publish(hashes("a", 8), 4, 0, 1)
    cache.end_step()
    assert (first.places, first.write) == ((0,), (1,))
    found = cache.find(hashes("a", 16), 4, 16)
    assert [block.block_id for block in found] == [1]
    cache.hold("a", found)
    assert cache.publish(hashes("b", 8), 4, 0, 1).write == (), "the only block is read"
    cache.end_step()
    assert not cache.held and pool.get_num_free_blocks() == 1
    written = cache.publish(hashes("b", 8), 4, 0, 1)
    assert written.write == (1,)
    assert cache.publish(hashes("c", 8), 4, 0, 1).write == ()
    cache.end_step()
    assert not cache.find(hashes("a", 8), 4, 8) and not cache.find(hashes("c", 8), 4, 8)
    assert cache.find(hashes("b", 8), 4, 8) and not cache.find(hashes("b", 8), 6, 8)
    assert pool.get_num_free_blocks() == 1


def test_what_is_evicted_within_is_filled_again() -> None:
    pool = BlockPool(20, enable_caching=True, hash_block_size=BLOCK)
    cache, prompt = StateCache(pool, ROWS, BLOCK), hashes("a", 32)
    blocks = cache.publish(prompt, 4, 0, 4)
    cache.end_step()
    assert blocks.places == (0, 1, 2, 3) and len(set(blocks.write)) == 4
    pool.evict_blocks({blocks.write[1]})
    assert len(cache.find(prompt, 4, 32)) == 1
    again = cache.publish(prompt, 4, 0, 4)
    cache.end_step()
    assert again.places == (1,)
    assert len(cache.find(prompt, 4, 31)) == 3


def test_the_end_of_a_prompt_goes_first() -> None:
    """Whatever the step that filled it; a run from the first token on is all that can be read."""
    pool = BlockPool(11, enable_caching=True, hash_block_size=BLOCK)
    cache, prompt = StateCache(pool, ROWS, BLOCK), hashes("a", 80)
    for first in range(0, 10, 2):
        cache.publish(prompt, 4, first, first + 2)
        cache.end_step()
    for taken in range(10):
        assert len(cache.find(prompt, 4, 80)) == 10 - taken
        pool.get_new_blocks(1)


def test_no_part_of_a_prompt_makes_room_for_another() -> None:
    """Of five steps' states three fit; what comes after a gap nobody could read."""
    pool = BlockPool(7, enable_caching=True, hash_block_size=BLOCK)
    cache, prompt = StateCache(pool, ROWS, BLOCK), hashes("a", 80)
    found = []
    for first in range(0, 10, 2):
        found += cache.publish(prompt, 4, first, first + 2).places
        cache.end_step()
    assert found == [*range(6)] and len(cache.find(prompt, 4, 80)) == 6
    pool.evict_blocks({cache.find(prompt, 4, 80)[3].block_id})
    assert cache.publish(prompt, 4, 6, 8).places == ()
    cache.end_step()
    assert pool.get_num_free_blocks() == 6


def test_states_lie_under_entries_of_types_that_ran_on_a_gpu() -> None:
    assert all(map(overlays, ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")))
    assert not overlays("fp8_e5m2")


@pytest.mark.parametrize(
    ("layers", "ranks", "dtype", "says"),
    [
        (2, 1, "auto", None),
        (1, 1, "auto", ["KV groups of 2 layers, and there are 1 in one: leave policies out of"]),
        (1, 2, "auto", ["KV groups of 2 layers", "fewer tensor-parallel ranks"]),
        (1, 1, "fp8", ["KV groups of 2 layers", "an unquantized KV cache"]),
    ],
)
def test_a_server_that_can_keep_no_states_says_what_would(
    caplog: pytest.LogCaptureFixture,
    layers: int,
    ranks: int,
    dtype: str,
    says: list[str] | None,
) -> None:
    """A page of this model holds the states of two thirds of its tokens; a group has `layers`."""
    sizes: Any = dict(block_size=32, num_kv_heads=3, head_size=64, dtype=torch.float32)
    spec = FirstStageAttentionSpec(**sizes)
    groups = [KVCacheGroupSpec([f"layer {n}" for n in range(layers)], spec)]
    kv_cache_config = KVCacheConfig(num_blocks=2, kv_cache_tensors=[], kv_cache_groups=groups)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32, get_hidden_size=lambda: 576),
        cache_config=SimpleNamespace(cache_dtype=dtype),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    pool = BlockPool(2, enable_caching=True, hash_block_size=32)
    logger = logging.getLogger("vllm.kvx.cache")
    logger.addHandler(caplog.handler)
    try:
        cache = StateCache.of(kv_cache_config, config, pool, 32)
    finally:
        logger.removeHandler(caplog.handler)
    if says is None:
        assert cache is not None and cache.tokens == 32 and not caplog.records
        return
    (told,) = {record.getMessage() for record in caplog.records}
    assert cache is None and all(part in told for part in says), told
    everything = ("KV groups", "ranks", "unquantized")
    assert sum(part in told for part in everything) == len(says), told
