"""Blocks that retention sets aside, keeps and frees, without an engine."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvx.cache.dropped_blocks import in_turn_to_free
from vllm_kvx.cache.kv_cache_specs import FirstStageAttentionSpec, LaterStageAttentionSpec
from vllm_kvx.cache.later_stage_manager import LaterStageKVCacheManager
from vllm_kvx.cache.managers import FirstStageKVCacheManager
from vllm_kvx.cache.request_kv import RequestKV
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.storage import storage_of

BLOCK = 4
PROMPT = 38  # Ten blocks, the last one half full; four stay.
POLICY = parse_policy(
    "structkv:pivot=3,struct_rate=1,kv_rate=0.4,kv_floor=0,granularity=block,window=3"
)
KEPT = [1, 4, 5, 9]
POOL = 20


class Blocks:
    """A manager with its own pool, and request `a`; every change checks that no block is lost."""

    def __init__(self, is_lower: bool) -> None:
        self.pool = BlockPool(POOL + 1, enable_caching=False, hash_block_size=BLOCK)
        sizes: Any = dict(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        common: Any = dict(
            block_pool=self.pool,
            enable_caching=False,
            kv_cache_group_id=0,
            scheduler_block_size=BLOCK,
        )
        self.manager: FirstStageKVCacheManager | LaterStageKVCacheManager
        if is_lower:
            self.manager = FirstStageKVCacheManager(FirstStageAttentionSpec(**sizes), **common)
        else:
            spec = LaterStageAttentionSpec(**sizes, stage=1, start_layer=4)
            self.manager = LaterStageKVCacheManager(spec, **common)
        self.add("a")

    def add(self, name: str) -> None:
        storage = storage_of(POLICY, PROMPT, self.manager.start_layer, BLOCK, 8)
        assert cdiv(storage.kept, BLOCK) == len(KEPT)
        self.manager.add_request(
            name, RequestKV(storage, POLICY, reads=False, publishes=0, by_block=True)
        )

    def grow(self, num_tokens: int, name: str = "a") -> list[int]:
        """Blocks of the request, by number, with room for these tokens."""
        wanted = self.manager.get_num_blocks_to_allocate(name, num_tokens, [], 0, 0, num_tokens)
        new = self.manager.allocate_new_blocks(name, num_tokens, num_tokens)
        assert len(new) == wanted
        self.check()
        return self.of(name)

    def shrink(self, num_tokens: int = PROMPT) -> None:
        self._free(self.manager.shrink("a", num_tokens))

    def relink(self, num_tokens: int = PROMPT) -> None:
        self._free(self.manager.relink("a", num_tokens, KEPT))

    def _free(self, dropped: Mapping[int, KVCacheBlock]) -> None:
        self.pool.free_blocks(in_turn_to_free(self.pool, [dropped], None))
        self.check()

    def free(self, name: str = "a", *, is_over: bool = False) -> None:
        """A preempted request, or one that ends."""
        self.manager.free(name)
        if is_over:
            self.manager.remove_request(name)
        self.check()

    def of(self, name: str = "a") -> list[int]:
        return [block.block_id for block in self.manager.req_to_blocks.get(name, ())]

    @property
    def num_free(self) -> int:
        return self.pool.get_num_free_blocks()

    def check(self) -> None:
        """Every block is free or held, once."""
        manager = self.manager
        held = [i for name in manager.req_to_blocks for i in self.of(name)]
        held += [b.block_id for kv in manager.requests.values() for b in kv.undecided]
        free = [b.block_id for b in self.pool.free_block_queue.get_all_free_blocks()]
        assert sorted(held + free) == list(range(1, POOL + 1))
        assert self.num_free == len(free)
        assert all(b.ref_cnt == (b.block_id in held) for b in self.pool.blocks[1:])


@pytest.fixture(params=[True, False], ids=["first stage", "later stage"])
def blocks(request: pytest.FixtureRequest) -> Blocks:
    return Blocks(request.param)


def test_reported_before_the_next_schedule(blocks: Blocks) -> None:
    prompt = blocks.grow(PROMPT)
    assert len(prompt) == 10
    blocks.relink()
    stay = [prompt[i] for i in KEPT]
    assert blocks.of() == stay and blocks.num_free == POOL - 4
    blocks.shrink()
    assert blocks.of() == stay
    assert blocks.grow(PROMPT + 2) == stay, "the last block is half full"
    grown = blocks.grow(PROMPT + 3)
    assert grown[:4] == stay and len(grown) == 5
    blocks.free(is_over=True)
    assert blocks.num_free == POOL


def test_reported_after_the_next_schedule(blocks: Blocks) -> None:
    """Meanwhile the dropped blocks are nobody's, and a block is appended."""
    prompt = blocks.grow(PROMPT)
    blocks.shrink()
    assert len(blocks.of()) == 4 and blocks.num_free == POOL - 10
    (*_, appended) = blocks.grow(PROMPT + 3)
    assert appended not in prompt and blocks.num_free == POOL - 11
    blocks.relink(PROMPT + 3)
    expected = [*(prompt[i] for i in KEPT), appended]
    assert blocks.of() == expected and blocks.num_free == POOL - 5
    for repeat in (blocks.shrink, blocks.relink):
        repeat(PROMPT + 3)
        assert blocks.of() == expected
    blocks.free(is_over=True)
    assert blocks.num_free == POOL


@pytest.mark.parametrize("is_over", [True, False], ids=["aborted", "preempted"])
@pytest.mark.parametrize("appended", [0, 3])
def test_gone_before_the_report(blocks: Blocks, is_over: bool, appended: int) -> None:
    blocks.grow(PROMPT)
    blocks.shrink()
    blocks.grow(PROMPT + appended)
    blocks.free(is_over=is_over)
    assert blocks.num_free == POOL
    blocks.relink(PROMPT + appended)
    assert blocks.num_free == POOL and not blocks.manager.req_to_blocks


def test_preempted_starts_over(blocks: Blocks) -> None:
    """The prompt has all its blocks again, and is shrunk and re-linked again."""
    blocks.grow(PROMPT)
    blocks.shrink()
    blocks.free()
    blocks.relink()
    blocks.add("b")
    blocks.grow(3 * BLOCK, "b")  # So that the blocks are others.
    assert len(blocks.grow(30)) == 8
    prompt = blocks.grow(PROMPT)
    assert len(prompt) == 10
    blocks.shrink()
    blocks.grow(PROMPT + 1)
    blocks.relink(PROMPT + 1)
    assert blocks.of() == [prompt[i] for i in KEPT]
    blocks.free("b", is_over=True)
    blocks.free(is_over=True)
    assert blocks.num_free == POOL


def test_nobody_knows_the_request(blocks: Blocks) -> None:
    blocks.manager.relink("b", PROMPT, KEPT)
    blocks.check()
    assert "b" not in blocks.manager.req_to_blocks
    blocks.relink()  # One that still waits holds nothing.
    assert not blocks.of() and blocks.num_free == POOL


def test_what_was_kept_is_not_the_next_ones(blocks: Blocks) -> None:
    """Freed blocks are taken by another; the first to end gives back its own alone."""
    prompt = blocks.grow(PROMPT)
    blocks.shrink()
    blocks.add("b")
    blocks.grow(PROMPT, "b")
    assert blocks.num_free == 0
    blocks.relink()
    stay = [prompt[i] for i in KEPT]
    taken = set(blocks.grow(PROMPT + 10)) - set(stay)
    assert len(taken) == 2 and taken < set(prompt), "what was dropped is used again"
    others = blocks.of("b")
    blocks.free(is_over=True)
    assert blocks.of("b") == others and blocks.num_free == POOL - 10
