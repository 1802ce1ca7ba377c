"""The scheduler's side: queues, blocks, the prefix cache."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest


def _admission(engine: Any) -> Any:
    """Where prompts wait and chunks end; None on a stock scheduler."""
    return getattr(engine.scheduler, "admission", None)


def free_windows(engine: Any) -> int:
    """Windows that may be spread over chunks now."""
    admission = _admission(engine)
    return 0 if admission is None else admission.free_windows


def watch_free_windows(engine: Any) -> list[int]:
    """Grows by `free_windows` after every schedule."""
    return _watch(engine, free_windows)


def used_stash_pages(engine: Any) -> int:
    """Stash pages that the scheduler has given to prompts."""
    return used_pages(engine.scheduler)


def state_tokens(engine: Any) -> int:
    """Tokens of a block of hidden states in the prefix cache."""
    return engine.scheduler.sharing.states.tokens


def upper_managers(engine: Any) -> list[Any]:
    """The managers of KV groups that hold less than their requests' tokens from the start."""
    return engine.scheduler.later_stage_managers


def assert_scheduler_forgot(engine: Any, windows: int) -> None:
    """No request, page or window (of `windows`) is held by the scheduler and its managers."""
    scheduler, admission = engine.scheduler, _admission(engine)
    for manager in getattr(scheduler, "later_stage_managers", []):
        assert not manager.requests and not manager._to_copy and not manager.req_to_blocks
    for manager in getattr(scheduler, "first_stage_managers", []):
        assert not manager.requests and not manager.req_to_blocks
    if admission is not None:
        assert not admission._prompts and not admission._pages and not admission._split
        assert used_pages(scheduler) == 0 and admission.free_windows == windows
        assert not admission._waiting_since and not admission._seekers
        assert not scheduler._to_shrink and not scheduler._counted_unshared


def owed_blocks(scheduler: Any) -> int:
    """Blocks that the scheduler leaves for copies before any other request begins."""
    managers = (*scheduler.first_stage_managers, *scheduler.later_stage_managers)
    return sum(manager.owed() for manager in managers)


def left_in_scheduler(scheduler: Any) -> dict[str, Any]:
    """What an idle scheduler of ours still holds, by kind; all empty if it forgot everything."""
    admission = scheduler.admission
    full = *scheduler.first_stage_managers, *scheduler.later_stage_managers
    managers = *full, *scheduler._sliding_managers
    return {
        "prompts": admission._prompts,
        "pages": used_pages(scheduler) or admission._pages,
        "windows": admission._split,
        "waiting": admission._waiting_since or admission._seekers,
        "to shrink": scheduler._to_shrink,
        "counted": scheduler._counted_unshared,
        "managed": any(m.requests or any(m.req_to_blocks.values()) for m in managers),
    }


def used_pages(scheduler: Any) -> int:
    """Stash pages that a scheduler of ours has given to prompts."""
    from vllm_kvx.policy.storage import stash_pages

    pages: int = stash_pages(scheduler.kv_settings.stash_tokens) - scheduler.admission.free_pages
    return pages


def stash_seekers(scheduler: Any) -> set[str]:
    """Requests that a scheduler of ours believes to be in the queue without their stash pages."""
    return set(scheduler.admission._seekers)


def watch_blocks(scheduler: Any) -> list[dict[str, Any]]:
    """Grows by the new blocks of every request, by KV group, with every schedule."""
    given: list[dict[str, Any]] = []
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        here = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
        given.append(here | {new.req_id: new.block_ids for new in output.scheduled_new_reqs})
        return output

    scheduler.schedule = watched
    return given


def count_allocations(scheduler: Any) -> list[str]:
    """Grows by a request's id whenever vLLM is asked for its blocks."""
    coordinator, asked = scheduler.kv_cache_manager.coordinator, list[str]()
    allocate = coordinator.allocate_new_blocks

    def counted(request_id: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(request_id)
        return allocate(request_id, *args, **kwargs)

    coordinator.allocate_new_blocks = counted
    return asked


def published_blocks(scheduler: Any) -> dict[tuple[int, str], int]:
    """By KV group and request, how many of its blocks are in the prefix cache."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return {
        (group, name): count
        for group, manager in enumerate(managers)
        for name, count in manager.num_cached_block.items()
    }


def read_events(engine: Any, read: Callable[[bytes], None], after_step: Callable[[], None]) -> None:
    """Hands every published batch of KV cache events to `read`, encoded as it is sent."""
    from msgspec.msgpack import Encoder

    core, encode = engine.core, Encoder().encode
    step = core.step_fn
    engine.scheduler.kv_event_publisher.publish = lambda batch: read(encode(batch))

    def stepped() -> Any:
        result = step()
        after_step()
        return result

    core.step_fn = stepped


def cached_hashes(engine: Any) -> set[tuple[int, int]]:
    """What is in the prefix cache, as KV cache events name it: hashes and KV groups."""
    from vllm.v1.core import kv_cache_utils as utils

    cached: Any = engine.pool.cached_block_hash_to_block._cache
    named: Any = utils.maybe_convert_block_hash
    return {(named(utils.get_block_hash(key)), utils.get_group_id(key)) for key in cached}


def cached_blocks(pool: Any) -> dict[Any, list[int]]:
    """The blocks under each hash in the prefix cache of one KV group, as events name it."""
    from vllm.v1.core import kv_cache_utils as utils

    found: dict[Any, list[int]] = {}
    named: Any = utils.maybe_convert_block_hash
    for key, blocks in pool.cached_block_hash_to_block._cache.items():
        every = blocks.values() if isinstance(blocks, dict) else [blocks]
        found[named(utils.get_block_hash(key))] = [block.block_id for block in every]
    return found


def hashes_of_several_blocks(engine: Any) -> int:
    """How many hashes in the prefix cache have more than one block."""
    cached = engine.pool.cached_block_hash_to_block._cache
    return sum(isinstance(blocks, dict) and len(blocks) > 1 for blocks in cached.values())


def watch_evictions(engine: Any) -> set[int]:
    """Grows by the blocks that a scheduler of ours takes out of the prefix cache."""
    gone: set[int] = set()
    evict = engine.pool.evict_blocks

    def watched(block_ids: set[int]) -> None:
        gone.update(block_ids)
        evict(block_ids)

    engine.pool.evict_blocks = watched
    return gone


def let_quiet_steps_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether a step that should need nothing does."""
    from vllm_kvx.cache.decode_fast_path import DecodeFastPath

    monkeypatch.setattr(DecodeFastPath, "_check", lambda *_: None)


def watch_quiet_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the requests that are known to need nothing, as often as it turns out to be true."""
    from vllm_kvx.cache.decode_fast_path import DecodeFastPath

    quiet, check = list[str](), DecodeFastPath._check

    def watched(self: Any, request: Any, ask: Callable[[], Any]) -> None:
        check(self, request, ask)
        quiet.append(request.request_id)

    monkeypatch.setattr(DecodeFastPath, "_check", watched)
    return quiet


def ask_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is known to need nothing."""
    from vllm_kvx.cache.decode_fast_path import DecodeFastPath

    monkeypatch.setattr(DecodeFastPath, "_remember", lambda *_: None)


def forecast_more_room(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Requests are believed to have room for so many tokens more than they have."""
    from vllm_kvx.cache.managers import PolicyKVCacheManager

    stock = PolicyKVCacheManager.fast_path_until

    def fast_path_until(self: Any, request_id: str, num_tokens: int) -> tuple[int, int]:
        room, full_at = stock(self, request_id, num_tokens)
        return room + tokens, full_at + tokens

    monkeypatch.setattr(PolicyKVCacheManager, "fast_path_until", fast_path_until)


def limit_prefix_hits(engine: Any, tokens: int) -> bool:
    """vLLM takes no more than `tokens` of any prefix; False where it has no such limit: 0.32."""
    stock = engine.scheduler._get_local_prefix_cache_hit
    from vllm.v1.core.sched.scheduler import Scheduler

    if "max_cache_hit_length" not in signature(Scheduler._get_local_prefix_cache_hit).parameters:
        return False

    def limited(request: Any, limit: int | None) -> Any:
        assert limit is None, "vLLM has a limit of its own in this server"
        return stock(request, tokens)

    engine.scheduler._get_local_prefix_cache_hit = limited
    return True


def watch_chunks(engine: Any) -> dict[str, list[int]]:
    """By request, in the order of arrival, where its chunks begin."""
    chunks: dict[str, list[int]] = {}
    admission = _admission(engine)
    clip = admission.clip

    def watched(request: Any, start: int, num_new_tokens: int) -> int:
        count = clip(request, start, num_new_tokens)
        if count:
            chunks.setdefault(request.request_id, []).append(start)
        return count

    admission.clip = watched
    return chunks


def watch_stash(engine: Any) -> list[int]:
    """Grows by the stash pages in use after every schedule."""
    return _watch(engine, used_stash_pages)


def _watch(engine: Any, count: Callable[[Any], int]) -> list[int]:
    """Grows by what `count` says of the engine after every schedule."""
    counts: list[int] = []
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        counts.append(count(engine))
        return output

    engine.scheduler.schedule = watched
    return counts
