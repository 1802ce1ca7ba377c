"""What managers know of a request."""

import hashlib
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request

from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import Storage

# More tokens than there will be.
NEVER = 1 << 62


@dataclass
class RequestKV:
    """What a manager must know of a request.

    Attributes:
        storage: what it stores in the manager's stage.
        policy: the policy that it runs under, parsed once, when it arrives.
        reads: a prefix hit must bring the blocks of this group; else it never needs them.
        publishes: leading tokens whose blocks others may read; None if all.
        resumes: tokens after which prompts that begin like it may go on from the cache, under its
            policy. vLLM keeps windows for other such places.
        anchors: leading tokens whose entries a prefix hit must bring along.
        anchor_hash: key of those entries, by their tokens; ``None`` if they cannot be shared.
        first_hash: key of the prompt's first block, which begins with them too.
        by_block: retention keeps whole blocks; which, the worker says.
        is_compact: retention has run, and what it dropped is freed, or is in `undecided`.
        undecided: blocks that the request holds until the worker has said which of its blocks
            stay. Until then its list has as many as stay, not yet the right ones.
        moves_out: what retention keeps moves to new blocks, so that those of the prompt stay in
            the prefix cache; else only where another request reads a block.
        private: by place in the list of blocks, the new block that takes it; between the step
            that compacts and the next.
        is_overwritten: some of its blocks are written over by that step, and out of the cache.
        stays: how many of its blocks may stay in the prefix cache when it gives them back; None if
            all. See ``Recency``.
        row: its policy's, by which blocks are counted.
        room: up to how many computed tokens it needs no block. full_at: at how many it may have a
            block to publish. Of all KV groups, kept by the first one's. See ``DecodeFastPath``.
        is_stock: whether it stores every token here, as stock vLLM does.
    """

    storage: Storage
    policy: KVPolicy
    reads: bool = True
    publishes: int | None = None
    resumes: tuple[int, ...] = ()
    anchors: int = 0
    anchor_hash: BlockHash | None = None
    first_hash: BlockHash | None = None
    by_block: bool = False
    is_compact: bool = False
    undecided: list[KVCacheBlock] = field(default_factory=list)
    moves_out: bool = False
    private: dict[int, KVCacheBlock] = field(default_factory=dict)
    is_overwritten: bool = False
    stays: int | None = None
    row: int = 0
    room: int = 0
    full_at: int = 0
    is_stock: bool = field(init=False)

    def __post_init__(self) -> None:
        prefill = self.storage.prefill
        self.is_stock = not (self.storage.changes or prefill.size or prefill.grows)

    @property
    def is_settled(self) -> bool:
        """Whether, once its prompt is in, each token adds one entry and nothing else changes."""
        return not self.storage.decode.grows and (self.is_compact or not self.storage.compacts)

    @property
    def has_moved(self) -> bool:
        """Whether the step that is being scheduled compacts it."""
        return bool(self.private) or self.is_overwritten

    def compacts_at(self, num_tokens: int) -> bool:
        """Whether the step that brings it to `num_tokens` moves what stays to other slots."""
        if self.is_compact or self.by_block or not self.storage.compacts:
            return False
        return num_tokens >= self.storage.settles_at


def anchor_hash(request: Request, anchors: int) -> BlockHash:
    """Key of the entries of `anchors` leading tokens: what vLLM's keys of blocks are made of."""
    token_ids, lora = list(request.all_token_ids[:anchors]), request.lora_request
    adapter = None if lora is None else (lora.lora_name, lora.lora_path)
    payload = repr(("kvx-anchors", token_ids, request.cache_salt, adapter)).encode()
    return BlockHash(hashlib.sha256(payload).digest())
