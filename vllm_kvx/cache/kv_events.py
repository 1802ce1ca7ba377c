"""KV cache events that say what the prefix cache holds, to routers that keep a set of hashes."""

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId


def report_last_blocks_alone(pool: BlockPool) -> None:
    """A hash is reported as removed when the last block under it goes, and not with each.

    Requests that compute one prefix at once leave several blocks under its hashes, and so does a
    prompt that comes again: its window is computed anew. vLLM reports each of these as stored, and
    as removed. A router forgets the hash with the first of them, while the others can still be
    read. Without policies that takes a full pool; under retention it is an everyday matter, as
    blocks are taken out of the cache where a prompt is compacted in place.
    """
    if not pool.enable_kv_cache_events:
        return
    stock = pool._emit_block_removed_events

    def _emit_block_removed_events(block_hashes: list[BlockHashWithGroupId]) -> None:
        get = pool.cached_block_hash_to_block.get_one_block
        stock([each for each in block_hashes if get(each) is None])

    pool._emit_block_removed_events = _emit_block_removed_events  # type: ignore[method-assign]
