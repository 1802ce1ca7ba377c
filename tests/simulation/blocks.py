"""The blocks that metrics show, against those that the pool has given out."""

from typing import Any

from simulation.cache import Mismatch


def check_blocks(scheduler: Any) -> None:
    """After a schedule: what is held is what is not free, and what is saved is what stock holds.

    Stock has a block in every KV group for each block of a request's tokens, and shares as many as
    are shared here.

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
        or abs(held + saved - stock) > rounding
        or min(stats["held"].values(), default=0) < 0
    ):
        raise Mismatch(f"{given_out} blocks held, {stock} in stock; counted: {stats}")


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
