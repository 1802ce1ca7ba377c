"""Managers of KV cache blocks that follow what a policy stores."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
)
from vllm.v1.request import Request

from vllm_kvx.cache.ledger import BlockLedger
from vllm_kvx.policy.storage import Storage

# Attribute of a step's output, where prompts came in that keep whole blocks: by request and
# stage, which of their blocks stay, ascending.
KEPT_BLOCKS = "kv_kept_blocks"


@dataclass
class RequestKV:
    """What a manager must know of a request.

    Attributes:
        storage: what it stores in the manager's stage.
        shares: whether its blocks may be read by others, and others' by it.
        publishes: leading tokens whose blocks others may read; None if all.
        anchors: leading tokens whose entries a prefix hit must bring along.
        anchor_hash: key of those entries, by their tokens; ``None`` if they cannot be shared.
        by_block: retention keeps whole blocks; which, the worker says.
        is_compact: retention has run, and what it dropped is freed, or is in `undecided`.
        undecided: blocks that the request holds until the worker has said which of its blocks
            stay. Until then its list has as many as stay, not yet the right ones.
        row: its policy's, by which blocks are counted.
    """

    storage: Storage
    shares: bool = True
    anchors: int = 0
    anchor_hash: BlockHash | None = None
    by_block: bool = False
    is_compact: bool = False
    undecided: list[KVCacheBlock] = field(default_factory=list)
    publishes: int | None = None
    row: int = 0


class _SizedByStorage(SingleTypeKVCacheManager):
    """Allocates by stored entries instead of token positions, where the two differ."""

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.requests: dict[str, RequestKV] = {}
        self.stage: int = getattr(kv_cache_spec, "stage", 0)
        self.start_layer: int = getattr(kv_cache_spec, "start_layer", 0)
        self._ledger: BlockLedger | None = None
        self._group = 0

    def watch(self, ledger: BlockLedger, group: int) -> None:
        """From now on tells the ledger what it takes, as KV group `group`."""
        self._ledger, self._group = ledger, group

    def _took(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks that were free are the request's."""
        kv = self.requests.get(request_id)
        if self._ledger is not None and kv is not None:
            self._ledger.take(blocks, self._group, kv.row)

    def add_request(self, request_id: str, kv: RequestKV) -> None:
        self.requests[request_id] = kv

    def remove_request(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def shrink(self, request_id: str, num_tokens: int) -> None:
        """Frees what retention dropped of a request with this many computed tokens.

        Called once the compacting step has been scheduled: the worker runs steps in order, so
        whoever gets the blocks writes them after that step has read them. Where whole blocks stay
        it only sets them aside: see `relink`.
        """
        kv = self.requests[request_id]
        if kv.is_compact or not kv.storage.compacts:
            return
        kv.is_compact = True
        blocks = self.req_to_blocks[request_id]
        kept = cdiv(kv.storage.stored_len(num_tokens), self.block_size)
        dropped = blocks[kept:]
        del blocks[kept:]
        if kv.by_block:
            kv.undecided = dropped
        else:
            self.block_pool.free_blocks(reversed(dropped))

    def relink(self, request_id: str, num_tokens: int, kept: Sequence[int]) -> None:
        """Keeps these of the prompt's blocks, ascending, and frees the others.

        The worker has them at the front of its table already. A request that has ended or starts
        over meanwhile gave all its blocks back.
        """
        kv = self.requests.get(request_id)
        if kv is None or not self.req_to_blocks.get(request_id):
            return
        self.shrink(request_id, num_tokens)
        if not kv.undecided:
            return
        blocks = self.req_to_blocks[request_id]
        prompt = [*blocks[: len(kept)], *kv.undecided]
        blocks[: len(kept)] = [prompt[i] for i in kept]
        kv.undecided = []
        stay = set(kept)
        self.block_pool.free_blocks([b for i, b in reversed([*enumerate(prompt)]) if i not in stay])

    def _required_blocks(self, request_id: str, num_tokens: int) -> int:
        kv = self.requests.get(request_id)
        if kv is None:
            return cdiv(num_tokens, self.block_size)
        length = kv.storage.stored_len if kv.is_compact else kv.storage.peak_len
        return cdiv(length(num_tokens), self.block_size)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        kv = self.requests.get(request_id)
        undecided: list[KVCacheBlock] = []
        if kv is not None:
            kv.is_compact = False  # A preempted request starts over.
            undecided, kv.undecided = kv.undecided, []
        return [*super().pop_blocks_for_free(request_id), *undecided]


class LowerKVCacheManager(_SizedByStorage, FullAttentionManager):
    """Blocks of one KV group of the first stage.

    Full attention, except that a request whose entries are dropped by retention, or whose layers
    above are skipped by saliency, has its blocks to itself.
    """

    def _is_private(self, request_id: str) -> bool:
        kv = self.requests.get(request_id)
        return kv is not None and not kv.shares

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        if not self._is_private(request_id):
            return super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
        held = len(self.req_to_blocks.get(request_id, ()))
        return max(self._required_blocks(request_id, num_tokens) - held, 0)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        if self._is_private(request_id):
            num_blocks = self._required_blocks(request_id, num_tokens)
            num_tokens = num_tokens_main_model = num_blocks * self.block_size
        blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        self._took(request_id, blocks)
        return blocks

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

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        kv = self.requests.get(request.request_id)
        if kv is not None and not kv.shares:
            return
        if kv is not None and kv.publishes is not None:
            num_tokens = min(num_tokens, kv.publishes)
        super().cache_blocks(request, num_tokens, *args, **kwargs)


class PolicyKVCacheManager(_SizedByStorage):
    """Blocks of one KV group above the first stage, sized by stored entries.

    On a prefix hit in the lower layers the anchors are not computed, but their entries up here
    depend on their own tokens alone. So the first block of a request that did compute them is
    published under the anchors' tokens, and a request with a hit copies it into its own.
    """

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._to_publish: dict[str, BlockHash] = {}
        self._to_copy: dict[str, KVCacheBlock] = {}

    def find_anchors(self, anchor_hash: BlockHash) -> KVCacheBlock | None:
        """The published block that starts with these anchors, if it is still in the pool."""
        found = self.block_pool.get_cached_block(anchor_hash, [self.kv_cache_group_id])
        return found[0] if found else None

    def _anchors_to_copy(self, request_id: str) -> KVCacheBlock | None:
        kv = self.requests.get(request_id)
        if kv is None or kv.anchor_hash is None:
            return None
        return self.find_anchors(kv.anchor_hash)

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
        assert not new_computed_blocks
        held = len(self.req_to_blocks.get(request_id, ()))
        num_new_blocks = max(self._required_blocks(request_id, num_tokens) - held, 0)
        if held == 0 and num_local_computed_tokens > 0:
            source = self._anchors_to_copy(request_id)
            if source is not None:
                # Touching an evictable block takes it out of the free ones.
                num_new_blocks += self._get_num_evictable_blocks([source])
        return num_new_blocks

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        assert not new_computed_blocks and num_external_computed_tokens == 0
        self.num_cached_block[request_id] = 0
        if num_local_computed_tokens > 0:
            source = self._anchors_to_copy(request_id)
            if source is not None:
                if source.ref_cnt == 0:
                    self._took(request_id, [source])
                self.block_pool.touch([source])
                self._to_copy[request_id] = source

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        req_blocks = self.req_to_blocks[request_id]
        num_new_blocks = self._required_blocks(request_id, num_tokens) - len(req_blocks)
        if num_new_blocks <= 0:
            return []
        new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
        req_blocks.extend(new_blocks)
        self._took(request_id, new_blocks)
        if self._record_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in new_blocks)
        source = self._to_copy.pop(request_id, None)
        if source is not None:
            # The scheduler releases both ends once the copy has run, hence the extra reference.
            self._pending_cow_copies.append((source, new_blocks[0]))
            new_blocks[0].ref_cnt += 1
        return new_blocks

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        kv = self.requests.get(request.request_id)
        if kv is None or kv.anchor_hash is None or num_tokens < kv.anchors:
            return
        blocks = self.req_to_blocks.get(request.request_id)
        if blocks and blocks[0].block_hash is None:
            self._to_publish.setdefault(request.request_id, kv.anchor_hash)

    def new_step_starts(self) -> None:
        """Publishes anchors that the previous step computed.

        Not earlier: copies run before a step's forward pass, so a request scheduled in the same
        step as the one that computes the anchors would copy an unwritten block.
        """
        super().new_step_starts()
        for request_id, anchor_hash in self._to_publish.items():
            blocks = self.req_to_blocks.get(request_id)
            if not blocks or blocks[0].block_hash is not None:
                continue
            if self.find_anchors(anchor_hash) is None:
                key = make_block_hash_with_group_id(anchor_hash, self.kv_cache_group_id)
                self.block_pool._insert_block_hash(key, blocks[0], num_tokens=self.block_size)
        self._to_publish.clear()

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._to_publish.pop(request_id, None)
        source = self._to_copy.pop(request_id, None)
        blocks = super().pop_blocks_for_free(request_id)
        return blocks if source is None else [*blocks, source]

    @classmethod
    def find_longest_cache_hit(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("groups of a policy stage take no part in prefix lookups")


def anchor_hash(token_ids: Sequence[int], salt: str | None) -> BlockHash:
    """Key of the anchors' entries: their tokens, and the request's cache salt."""
    payload = repr(("kvx-anchors", list(token_ids), salt)).encode()
    return BlockHash(hashlib.sha256(payload).digest())
