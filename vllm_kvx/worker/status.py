"""What a worker tells of itself: layout, pool and counters, for metrics and the status route."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_kvx.cache.pool import pool_tokens
from vllm_kvx.settings import KVSettings
from vllm_kvx.worker.requests import Requests
from vllm_kvx.worker.stats import PolicyStats


def counters_of(
    stats: PolicyStats, requests: Requests, block_tables: BlockTables
) -> dict[str, dict[str, Any]]:
    """By policy, what was counted, and the blocks that running requests hold and spare."""
    policies, sizes = stats.as_dict(), block_tables.block_sizes
    for index in requests.index.values():
        counters = policies[stats.names[requests.policy_rows[index]]]
        held = block_tables.num_blocks.np[:, index]
        full = [-(-int(requests.seq_lens[index]) // size) for size in sizes]
        counters["blocks_held"] += int(held.sum())
        counters["blocks_saved"] += int(sum(full) - held.sum())
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
        {"layers": group.layer_names, "block_size": size, "segment": stage}
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
