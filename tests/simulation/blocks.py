"""The blocks that metrics show, against those that the pool has given out."""

from collections.abc import Mapping
from typing import Any

from simulation.cache import Mismatch
from vllm_kvx.cache.sliding_stage_manager import SlidingStageKVCacheManager
from vllm_kvx.policy.methods.speed import Speed


def check_blocks(scheduler: Any) -> None:
    """After a schedule: what is held is what is not free, and what is saved is what stock holds.

    Stock has a block in every KV group for each block of a request's tokens, and shares as many as
    are shared here. Nothing is said of it while blocks wait for a step that may still write them.

    Raises:
        Mismatch: it is not so.
    """
    pool = scheduler.kv_cache_manager.block_pool
    stats = scheduler.policy_stats.as_dict(scheduler.requests)
    held, saved = (sum(stats[key].values()) for key in ("held", "saved"))
    managers, stock = scheduler.first_stage_managers, 0
    for manager in managers:
        held_ids: list[int] = []
        for request_id, blocks in manager.req_to_blocks.items():
            kv = manager.requests.get(request_id)
            if not blocks or kv is None:
                continue
            stock += -(-scheduler.requests[request_id].num_computed_tokens // manager.block_size)
            held_ids += [b.block_id for b in (*blocks, *kv.undecided, *kv.private.values())]
        stock -= len(held_ids) - len(set(held_ids))
    # The first stage's groups may have come by different blocks of one prefix.
    stock *= (len(managers) + len(scheduler.later_stage_managers)) / len(managers)
    given_out = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks() - _num_others(scheduler)
    rounding = len(stats["held"]) if len(managers) > 1 else 0
    if (
        held != given_out
        or (abs(held + saved - stock) > rounding and not scheduler.deferred_frees)
        or min(stats["held"].values(), default=0) < 0
    ):
        raise Mismatch(f"{given_out} blocks held, {stock} in stock; counted: {stats}")


def check_windows(scheduler: Any, output: Any, processed: Mapping[str, int]) -> None:
    """After a schedule: what is held above a cut where layers slide is what windows still reach.

    processed: by request, the tokens whose step has been heard of before.

    Raises:
        Mismatch: there are more blocks than tokens that run these layers fill, or fewer; or one is
            held that no token to come sees.
    """
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        if not isinstance(manager, SlidingStageKVCacheManager):
            continue
        size, ahead = manager.block_size, scheduler.vllm_config.num_speculative_tokens
        for name in output.num_scheduled_tokens:
            request, blocks = scheduler.requests[name], manager.req_to_blocks[name]
            speed, tail, anchors = manager.requests[name].policy.propagate, 0, 0
            if isinstance(speed, Speed) and manager.start_layer >= speed.cutoff:
                # The tail takes the places of the anchors.
                tail = max(request.num_prompt_tokens - speed.tail, 0)
                anchors = min(speed.anchors, tail)
            end, begin = request.num_computed_tokens, processed[name]
            entries = max(min(end, anchors), end - tail)
            passed = max(begin - tail - manager.sliding_window + 1, 0) // size
            held = [i for i, block in enumerate(blocks) if not block.is_null]
            count, most = (-(-each // size) for each in (entries, entries + ahead))
            if not count <= len(blocks) <= most or held != list(range(passed, len(blocks))):
                raise Mismatch(
                    f"{name}, group {manager.kv_cache_group_id}: holds {held} of {len(blocks)} "
                    f"blocks, want {passed} to {count}, with {begin} to {end} tokens"
                )


def _num_others(scheduler: Any) -> int:
    """Blocks of the KV groups that follow no policy."""
    ours = (*scheduler.first_stage_managers, *scheduler.later_stage_managers)
    return len(
        {
            block.block_id
            for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
            if manager not in ours
            for blocks in manager.req_to_blocks.values()
            for block in blocks
            if not block.is_null
        }
    )
