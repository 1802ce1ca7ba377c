"""What a worker tells of itself: layout, pool and counters, for metrics and the status route."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_kvx.cache.pool_capacity import VLLMS_OWN, pool_tokens
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.storage import STASH_PAGE, stash_pages
from vllm_kvx.worker.model_state import PolicyModelState


def stats_of(state: PolicyModelState) -> dict[str, Any]:
    """Layout, pool and cumulative counters of this rank, JSON-able."""
    memory, stash, told = state.memory, state.stash, state.stats.scheduler
    policies = _by_policy(state)
    return {
        "seconds_in_retention": memory.timer.seconds,
        "seconds_in_detector": memory.detector_timer.seconds,
        "kv_bytes_moved": sum(counters["kv_bytes_moved"] for counters in policies.values()),
        **({"retrieval": state.retrieval.stats()} if state.retrieval is not None else {}),
        "stash_tokens": state.settings.stash_tokens,
        "stash_tokens_used": stash.used_tokens if stash is not None else 0,
        "stash_waits": told.get("stash_waits", 0),
        "stash_wait_seconds": told.get("stash_wait_seconds", 0.0),
        "run_in_full": told.get("run_in_full", {}),
        "layout": layout_of_pool(
            state.kv_cache_config,
            state.settings,
            state.group_stages,
            state.block_tables.block_sizes,
            state.max_model_len,
        ),
        "policies": policies,
    }


def _by_policy(state: PolicyModelState) -> dict[str, dict[str, Any]]:
    """By policy name, all that is counted by policy."""
    memory, stash = state.memory, state.stash
    moved = memory.moved.tolist()
    retention, detector = memory.timer.seconds_by_row, memory.detector_timer.seconds_by_row
    recall = state.retrieval.sampler.by_row() if state.retrieval is not None else {}
    stashed: dict[int, int] = {}
    for prompt in state.requests.prompts.values() if stash is not None else ():
        if prompt.waits:
            tokens = stash_pages(prompt.settles_at) * STASH_PAGE
            stashed[prompt.stats_row] = stashed.get(prompt.stats_row, 0) + tokens
    policies = state.stats.as_dict()
    for name, row in state.stats.policies.names:
        mean, samples = recall.get(row, (None, 0))
        policies[name] |= {
            "seconds_in_retention": retention.get(row, 0.0),
            "seconds_in_detector": detector.get(row, 0.0),
            "kv_bytes_moved": moved[row],
            "stash_tokens_used": stashed.get(row, 0),
            "recall": mean,
            "recall_samples": samples,
        }
    return policies


def layout_of_pool(
    config: KVCacheConfig,
    settings: KVSettings,
    group_stages: Sequence[int],
    block_sizes: Sequence[int],
    max_model_len: int,
) -> dict[str, Any]:
    """The KV groups that vLLM formed, and what the pool holds."""
    pool = pool_tokens(config, settings, max_model_len)
    groups = [
        {
            "layers": group.layer_names,
            "block_size": size,
            "segment": None if stage == VLLMS_OWN else stage,
        }
        for group, size, stage in zip(
            config.kv_cache_groups, block_sizes, group_stages, strict=True
        )
    ]
    return {
        "groups": groups,
        "num_blocks": pool.num_blocks,
        "pool_prompt_tokens": pool.policy,
        "stock_pool_tokens": pool.stock,
    }
