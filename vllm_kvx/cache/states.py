"""Hidden states of cached prompts: what the layers above a selection need of tokens they skip.

Selected tokens run the later stages from their states below them, which the stash holds. A request
that takes a prefix from the cache does not run the first stage over it, so their states have to
come from the cache too. They lie in blocks of the same pool: a block's pages in all layers of a
KV group hold the states of as many tokens as fit. Such a block is published under the tokens it
covers, evicted like any other, and held by nobody: the step that schedules it fills it, and a
request that reads it copies it into the stash before it runs.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, SlidingWindowSpec

from vllm_kvx.cache.messages import StateBlocks
from vllm_kvx.cache.pool_capacity import layer_spec, policy_groups

logger = init_logger("vllm.kvx.cache")

# Groups take part in the keys of vLLM's cache; states are of the first.
_GROUP = 0


@dataclass(frozen=True)
class StateRows:
    """How many tokens' states a block holds.

    per_page: in one layer's page. pages: layers of a KV group. tokens: of the block, whole blocks
    of the KV cache; 0 if not one fits, or entries are of a type that was not tried.
    """

    per_page: int
    pages: int
    tokens: int

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig, config: VllmConfig) -> "StateRows":
        """The same on scheduler and workers."""
        groups, model = policy_groups(kv_cache_config), config.model_config
        spec = layer_spec(groups[0])
        assert isinstance(spec, AttentionSpec)
        if not overlays(config.cache_config.cache_dtype, slides(kv_cache_config)):
            return cls(0, 0, 0)
        state_bytes = model.get_hidden_size() * model.dtype.itemsize  # type: ignore[union-attr]
        per_page = spec.unpadded_page_size_bytes // state_bytes
        pages = max(len(group.layer_names) for group in groups)
        size = spec.block_size
        return cls(per_page, pages, per_page * pages // size * size)


def overlays(cache_dtype: str, beside_windows: bool = False) -> bool:
    """Whether states may lie in blocks that entries of this type use later.

    Their bytes may be no numbers as 8-bit entries, and a request's last block may still hold such
    bytes beyond its last entry. FlashAttention 3 and Triton never use those of e4m3: a test on a
    GPU fills all free blocks with NaN, and no logprob changes. No backend ran with e5m2 there, nor
    with 8 bits where a block may hold such bytes before the first entry of a window.
    """
    return cache_dtype != "fp8_e5m2" and not (beside_windows and cache_dtype.startswith("fp8"))


def _larger_pages(rows: StateRows, config: VllmConfig, block_size: int) -> list[str]:
    """What gives a KV block the room that it lacks for the hidden states of its tokens.

    rows: whose `tokens` are 0, since `per_page` times `pages` is less than `block_size`.
    """
    ways = []
    if rows.per_page:
        ways.append(
            f"KV groups of {cdiv(block_size, rows.per_page)} layers, and there are {rows.pages} in "
            "one: leave policies out of kv_layout that split the layers elsewhere, or name "
            "another tsp_layer or pivot"
        )
    else:
        ways.append("a larger --block-size")
    if config.parallel_config.tensor_parallel_size > 1:
        ways.append("fewer tensor-parallel ranks")
    if config.cache_config.cache_dtype.startswith("fp8"):
        ways.append("an unquantized KV cache")
    return ways


def slides(kv_cache_config: KVCacheConfig) -> bool:
    """Whether some layers slide over a window."""
    specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    return any(isinstance(spec, SlidingWindowSpec) for spec in specs)


class StateCache:
    """Finds and publishes blocks of states. block_size: tokens of a KV cache block."""

    @classmethod
    def of(
        cls, kv_cache_config: KVCacheConfig, config: VllmConfig, pool: BlockPool, block_size: int
    ) -> "StateCache | None":
        """That of a server with a stash; None, and the log says why, where it can keep none."""
        rows = StateRows.of(kv_cache_config, config)
        if rows.tokens:
            return cls(pool, rows, block_size)
        cache_dtype, beside = config.cache_config.cache_dtype, slides(kv_cache_config)
        if not overlays(cache_dtype, beside):
            logger.warning(
                "Policies that select tokens share no prefix here: that was never tested with "
                "an %s KV cache%s caches allow it.",
                cache_dtype,
                " beside layers that slide over a window. 16-bit"
                if beside
                else ". fp8 (e4m3) and 16-bit",
            )
        else:
            logger.warning(
                "Policies that select tokens share no prefix here: the pages of a KV block of "
                "%d tokens do not hold the hidden states of as many. These would: %s.",
                block_size,
                "; ".join(_larger_pages(rows, config, block_size)),
            )
        return None

    def __init__(self, pool: BlockPool, rows: StateRows, block_size: int) -> None:
        self.tokens = rows.tokens
        self._pool, self._stride = pool, rows.tokens // block_size
        self._held: dict[str, list[KVCacheBlock]] = {}
        # By request of this step, the blocks of its prompt so far, in order.
        self._filled: list[list[KVCacheBlock]] = []

    def find(self, hashes: Sequence[BlockHash], layer: int, num_tokens: int) -> list[KVCacheBlock]:
        """The longest run of cached blocks, within a prompt's first `num_tokens`.

        hashes: vLLM's, by KV cache block. layer: the first one above the layer that selects, which
            tells states of one selecting layer from those of another.
        """
        found: list[KVCacheBlock] = []
        for index in range(num_tokens // self.tokens):
            cached = self._pool.get_cached_block(self._key(hashes, layer, index), [_GROUP])
            if not cached:
                break
            found += cached
        return found

    def following(
        self, hashes: Sequence[BlockHash], layer: int, num_tokens: int
    ) -> list[BlockHash]:
        """The key of the states after a prompt's first `num_tokens`, if it has a whole block."""
        index = num_tokens // self.tokens
        return (
            [self._key(hashes, layer, index)] if (index + 1) * self._stride <= len(hashes) else []
        )

    def keys(self, hashes: Sequence[BlockHash], layer: int) -> list[BlockHash]:
        """Those of all of a prompt's states."""
        return [self._key(hashes, layer, i) for i in range(len(hashes) // self._stride)]

    def hold(self, request_id: str, blocks: list[KVCacheBlock]) -> None:
        """Nobody gets these until the step is scheduled, in place of what the request held."""
        self.let_go(request_id)
        if blocks:
            self._pool.touch(blocks)
            self._held[request_id] = blocks

    def let_go(self, request_id: str) -> None:
        """What the request held is evictable again."""
        self._pool.free_blocks(reversed(self._held.pop(request_id, [])))

    @property
    def held(self) -> Mapping[str, Sequence[KVCacheBlock]]:
        """The blocks of hidden states that each request would read in this step, by request id."""
        return self._held

    def publish(
        self, hashes: Sequence[BlockHash], layer: int, first: int, last: int
    ) -> StateBlocks:
        """New blocks for a prompt's states [first, last), counted in blocks, as far as there are.

        None where an earlier one is not in the cache: nobody could read what comes after it. To be
        followed by `end_step`, once all requests of the step have theirs.
        """
        earlier = self.find(hashes, layer, first * self.tokens)
        if len(earlier) < first:
            return StateBlocks()
        # No part of a prompt makes room for another.
        self._pool.touch(earlier)
        keys = {index: self._key(hashes, layer, index) for index in range(first, last)}
        keys = {i: k for i, k in keys.items() if not self._pool.get_cached_block(k, [_GROUP])}
        blocks = self._pool.get_new_blocks(min(len(keys), self._pool.get_num_free_blocks()))
        for key, block in zip(keys.values(), blocks, strict=False):
            named = make_block_hash_with_group_id(key, _GROUP)
            self._pool._insert_block_hash(named, block, num_tokens=self.tokens)
        self._filled.append([*earlier, *blocks])
        ids = tuple(block.block_id for block in blocks)
        return StateBlocks(places=tuple(keys)[: len(ids)], write=ids)

    def end_step(self) -> None:
        """The step's blocks are evictable: who gets them writes them in a later step."""
        for blocks in self._filled:
            # A prompt's last ones are to go first, whatever step they are of.
            self._pool.free_blocks(reversed(blocks))
        self._filled = []
        for request_id in list(self._held):
            self.let_go(request_id)

    def _key(self, hashes: Sequence[BlockHash], layer: int, index: int) -> BlockHash:
        """By the tokens up to the block's end, and the layer."""
        last = hashes[(index + 1) * self._stride - 1]
        return BlockHash(hashlib.sha256(b"kvx-states %d " % layer + last).digest())
