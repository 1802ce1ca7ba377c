"""Managers of KV cache blocks that follow what a policy stores."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
)
from vllm.v1.request import Request

from vllm_kvx.cache.block_owners import BlockOwners
from vllm_kvx.cache.messages import PrivateBlocks
from vllm_kvx.cache.prefix_eviction import forget
from vllm_kvx.cache.request_kv import NEVER, RequestKV
from vllm_kvx.cache.shared_blocks import copies_to_come


class PolicyKVCacheManager(SingleTypeKVCacheManager):
    """Allocates by stored entries instead of token positions, where the two differ.

    A prompt that retention compacts is published like any other. In the step that compacts it
    needs new blocks for what stays: for all of it if the pool has plenty, otherwise only in the
    place of blocks that others read, and then the rest is taken out of the prefix cache.
    """

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.requests: dict[str, RequestKV] = {}
        self.stage: int = getattr(kv_cache_spec, "stage", 0)
        self.start_layer: int = getattr(kv_cache_spec, "start_layer", 0)
        # All groups of the server.
        self.siblings: Sequence[PolicyKVCacheManager] = (self,)
        # Requests with blocks here, whose prompt is to be compacted in them or out of them.
        self._compacting: dict[str, RequestKV] = {}
        # Whether drafts are written here; other drafters look ahead in layers of their own.
        self.holds_drafts = False
        self._owners: BlockOwners | None = None
        self._group = 0

    def watch(self, owners: BlockOwners, group: int) -> None:
        """Sets whom to tell of every block that it takes: `owners`, as KV group number `group`."""
        self._owners, self._group = owners, group

    def _took(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks that were free are the request's."""
        kv = self.requests.get(request_id)
        if self._owners is not None and kv is not None:
            self._owners.take(blocks, self._group, kv.row)

    def add_request(self, request_id: str, kv: RequestKV) -> None:
        self.requests[request_id] = kv

    def remove_request(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def fast_path_until(self, request_id: str, num_tokens: int) -> tuple[int, int]:
        """See ``RequestKV.room`` and ``full_at``, of this group; 0 where it cannot be said.

        num_tokens: computed ones, the prompt among them: every further one adds one entry.
        """
        kv, blocks = self.requests.get(request_id), self.req_to_blocks.get(request_id)
        if kv is None or not blocks or not kv.is_settled:
            return 0, 0
        room = num_tokens + len(blocks) * self.block_size - kv.storage.stored_len(num_tokens)
        if not self.enable_caching or kv.is_compact or kv.is_overwritten:
            return room, NEVER
        full_at = (self.num_cached_block.get(request_id, 0) + 1) * self.block_size
        return room, full_at if kv.publishes is None or kv.publishes >= full_at else NEVER

    # Allocation.

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        if not self.holds_drafts:
            num_tokens = num_tokens_main_model
        kv = self.requests.get(request_id)
        owed = self._owed(kv, new_computed_blocks) if apply_admission_cap else 0
        if kv is None or kv.is_stock:
            return owed + super().get_num_blocks_to_allocate(
                request_id,
                num_tokens,
                new_computed_blocks,
                total_computed_tokens,
                num_local_computed_tokens,
                num_tokens_main_model,
                apply_admission_cap,
                prefill_end,
            )
        held = self.req_to_blocks.get(request_id, ())
        there = len(held) + len(new_computed_blocks)
        num_blocks = max(self._required_blocks(kv, num_tokens) - there, 0)
        # Touching an evictable block takes it out of the free ones.
        num_blocks += self._get_num_evictable_blocks(new_computed_blocks)
        if num_local_computed_tokens and not held:
            num_blocks += self._num_evictable_beside(request_id)
        # Admission asks for the least: what is kept in the cache must not delay anyone.
        if kv.compacts_at(num_tokens) and not apply_admission_cap:
            shared = [b.ref_cnt > 1 for b in held] + [b.ref_cnt > 0 for b in new_computed_blocks]
            num_blocks += len(self._places(kv, shared, kv.moves_out))
        return num_blocks + owed

    def _owed(self, kv: RequestKV | None, joined: Sequence[KVCacheBlock]) -> int:
        """Blocks that a request which begins must leave for copies of shared blocks.

        Copies of its own among them, if its prompt is to be compacted. Else it, or another one,
        could be preempted for a compaction that needs none without sharing.
        """
        writers: list[Sequence[KVCacheBlock]] = [
            self.req_to_blocks[name][: self._num_kept(other)]
            for name, other in self._compacting.items()
            if not other.has_moved
        ]
        if kv is not None and kv.storage.compacts and not (kv.by_block or kv.is_compact):
            writers.append(joined[: self._num_kept(kv)])
        return copies_to_come(writers, self._leaving(), joined) if writers else 0

    def owed(self) -> int:
        """Blocks that are left for copies before any other request begins."""
        return self._owed(None, ())

    def _leaving(self) -> list[list[KVCacheBlock]]:
        """Blocks of the requests that this step compacts; the next one gives them back."""
        return [self.req_to_blocks[n] for n, kv in self._compacting.items() if kv.has_moved]

    def num_passing_copies(self, request_id: str) -> int:
        """Copies that the request's compaction needs in this step, and would not in the next."""
        kept = self.req_to_blocks[request_id][: self._num_kept(self.requests[request_id])]
        gone = Counter(b.block_id for blocks in self._leaving() for b in blocks[: len(kept)])
        return sum(b.ref_cnt > 1 >= b.ref_cnt - gone[b.block_id] for b in kept)

    def _num_kept(self, kv: RequestKV) -> int:
        return cdiv(kv.storage.kept, self.block_size)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        if not self.holds_drafts:
            num_tokens = num_tokens_main_model
        kv = self.requests.get(request_id)
        if kv is None or kv.is_stock:
            blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
            self._took(request_id, blocks)
            return blocks
        blocks = self.req_to_blocks[request_id]
        count = self._required_blocks(kv, num_tokens) - len(blocks)
        new_blocks = self._new_blocks(request_id, count)
        blocks.extend(new_blocks)
        if kv.storage.compacts and not (kv.is_compact or kv.by_block):
            self._compacting[request_id] = kv
        if kv.compacts_at(num_tokens):
            self._make_room(request_id, kv, blocks)
        return new_blocks

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        free = [block for block in new_computed_blocks if block.ref_cnt == 0]
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        self._took(request_id, free)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As many as entries come, where another server has kept a part of the prompt."""
        kv = self.requests.get(request_id)
        if kv is not None and not kv.is_stock:
            num_external_computed_tokens = kv.storage.stored_len(num_external_computed_tokens)
        before = len(self.req_to_blocks[request_id])
        super().allocate_external_computed_blocks(
            request_id, num_local_computed_tokens, num_external_computed_tokens, *args, **kwargs
        )
        self._took(request_id, self.req_to_blocks[request_id][before:])

    def _num_evictable_beside(self, request_id: str) -> int:
        """Evictable blocks that a prefix hit takes besides those that it brings."""
        return 0

    def _new_blocks(self, request_id: str, count: int) -> list[KVCacheBlock]:
        if count <= 0:
            return []
        blocks: list[KVCacheBlock] = self.block_pool.get_new_blocks(count)
        self._took(request_id, blocks)
        if self._record_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in blocks)
        return blocks

    def _required_blocks(self, kv: RequestKV, num_tokens: int) -> int:
        length = kv.storage.stored_len if kv.is_compact else kv.storage.peak_len
        return cdiv(length(num_tokens), self.block_size)

    def _places(self, kv: RequestKV, shared: Sequence[bool], everything: bool) -> Sequence[int]:
        """The places that need a new block for what stays there.

        shared: of the request's blocks so far, whether others hold them.
        """
        kept = self._num_kept(kv)
        if everything:
            # Not the last block if it is partly filled: nobody else can read it.
            return range(min(kept, kv.storage.settles_at // self.block_size))
        return [place for place, is_shared in enumerate(shared[:kept]) if is_shared]

    def num_blocks_to_end(self, request_id: str) -> int:
        """New blocks that bring a running request to where it is compacted, and for doing so.

        Not those that keep the prompt in the cache.
        """
        kv, blocks = self.requests[request_id], self.req_to_blocks.get(request_id, ())
        length = kv.storage.settles_at
        count = max(self._required_blocks(kv, length) - len(blocks), 0)
        if kv.compacts_at(length):
            count += len(self._places(kv, [block.ref_cnt > 1 for block in blocks], False))
        return count

    def _make_room(self, request_id: str, kv: RequestKV, blocks: Sequence[KVCacheBlock]) -> None:
        """Takes the new blocks for what stays; what is written over leaves the prefix cache."""
        places = self._places(kv, [block.ref_cnt > 1 for block in blocks], kv.moves_out)
        new_blocks = self._new_blocks(request_id, len(places))
        kv.private = dict(zip(places, new_blocks, strict=True))
        kept = self._num_kept(kv)
        overwritten = next((p for p in range(min(kept, len(blocks))) if p not in kv.private), None)
        # Nor may what the step itself fills be published.
        kv.is_overwritten = not kv.moves_out
        if overwritten is not None:
            # Nor does anybody find what comes behind: it is not to outlive what can be found.
            gone = (b for b in blocks[overwritten:] if b.ref_cnt == 1 and b.block_hash is not None)
            self.block_pool.evict_blocks({block.block_id for block in gone})

    def private_blocks(self, request_id: str) -> PrivateBlocks | None:
        """The new blocks of the step that compacts the request, if it has any."""
        kv = self.requests.get(request_id)
        if kv is None or not kv.private:
            return None
        ids = tuple(block.block_id for block in kv.private.values())
        return PrivateBlocks(tuple(kv.private), ids)

    # Retention.

    def shrink(self, request_id: str, num_tokens: int) -> Mapping[int, KVCacheBlock]:
        """Takes from a request what retention dropped; returns it by place, to be freed.

        Called once the compacting step has been scheduled: the worker runs steps in order, so
        whoever gets the blocks writes them after that step has read them. Where whole blocks stay
        it only sets them aside: see `relink`.

        num_tokens: computed ones.
        """
        kv = self.requests[request_id]
        self._compacting.pop(request_id, None)
        if kv.is_compact or not kv.storage.compacts:
            return {}
        kv.is_compact = True
        blocks = self.req_to_blocks[request_id]
        kept = cdiv(kv.storage.stored_len(num_tokens), self.block_size)
        dropped = {p: b for p, b in enumerate(blocks) if p >= kept or p in kv.private}
        blocks[:] = [kv.private.get(place, b) for place, b in enumerate(blocks[:kept])]
        kv.private = {}
        if kv.by_block:
            kv.undecided = list(dropped.values())
            return {}
        return dropped

    def relink(
        self, request_id: str, num_tokens: int, kept: Sequence[int]
    ) -> Mapping[int, KVCacheBlock]:
        """Keeps these of the prompt's blocks, ascending; returns the others by place, to be freed.

        The worker has them at the front of its table already. A request that has ended or starts
        over meanwhile gave all its blocks back.
        """
        kv = self.requests.get(request_id)
        if kv is None or not self.req_to_blocks.get(request_id):
            return {}
        self.shrink(request_id, num_tokens)
        if not kv.undecided:
            return {}
        blocks = self.req_to_blocks[request_id]
        prompt = [*blocks[: len(kept)], *kv.undecided]
        blocks[: len(kept)] = [prompt[i] for i in kept]
        kv.undecided = []
        stay = set(kept)
        return {place: block for place, block in enumerate(prompt) if place not in stay}

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """The blocks of all groups, by place: a prefix that lost a block in one is lost in all, so
        that its end is to go first in each."""
        stays = kv.stays if (kv := self.requests.get(request_id)) is not None else None
        groups = [manager.pop_blocks(request_id) for manager in self.siblings]
        if stays is not None:
            forget(self.block_pool, chain.from_iterable(blocks[stays:] for blocks in groups))
        each = zip_longest(*groups)
        return [block for place in each for block in place if block is not None]

    def pop_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """Takes a request's blocks of this group out of the manager; the caller frees them."""
        kv = self.requests.get(request_id)
        beside: list[KVCacheBlock] = []
        self._compacting.pop(request_id, None)
        if kv is not None:
            # A preempted request starts over.
            beside = [*kv.undecided, *kv.private.values()]
            kv.is_compact = kv.is_overwritten = False
            kv.undecided, kv.private = [], {}
            kv.room = kv.full_at = 0
        return [*super().pop_blocks_for_free(request_id), *beside]

    # The prefix cache.

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Publishes full blocks under vLLM's own hashes: they hold what stock's would."""
        kv = self.requests.get(request.request_id)
        if kv is None or kv.is_compact or kv.is_overwritten:
            return
        if kv.publishes is not None:
            num_tokens = min(num_tokens, kv.publishes)
        # From vLLM 0.33 on, beside a head, the hash of a block waits for the token behind it.
        num_tokens = min(num_tokens, len(request.block_hashes) * self.block_pool.hash_block_size)
        published = self.num_cached_block.get(request.request_id, 0)
        full = num_tokens // self.block_size
        if published < full:
            self.block_pool.cache_full_blocks(
                request=request,
                blocks=self.req_to_blocks[request.request_id],
                num_cached_blocks=published,
                num_full_blocks=full,
                block_size=self.block_size,
                kv_cache_group_id=self.kv_cache_group_id,
            )
            self.num_cached_block[request.request_id] = full


class FirstStageKVCacheManager(PolicyKVCacheManager, FullAttentionManager):
    """Blocks of one KV group of the first stage, which every prompt token runs."""
