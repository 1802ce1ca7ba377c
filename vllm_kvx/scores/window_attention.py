"""Attention that keys get from the prompt's last queries: FastKV, SnapKV, PyramidKV, StructKV."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vllm_kvx.equations.saliency import per_kv_head
from vllm_kvx.ops.prompt.pool import pool_per_kv_head
from vllm_kvx.ops.prompt.saliency import window_saliency
from vllm_kvx.scores.base import KeyScores, LayerView, Score, ScoredPrompts


@dataclass(frozen=True)
class WindowAttention(Score):
    """FastKV's and SnapKV's estimator; without pooling, StructKV's (Eq. 2).

    Softmax rows of the window's queries are summed over the queries, max-pooled over neighbouring
    keys, and summed over the query heads of each KV head.

    reduction: `sum`, or `max` for the largest weight in the place of both sums.
    """

    reduction: Literal["sum", "max"] = "sum"

    def score(self, prompts: ScoredPrompts, layer: LayerView) -> KeyScores:
        sizes = (prompts.num_keys, prompts.windows, prompts.offsets)
        scores = window_saliency(
            prompts.window_queries(layer),
            layer.paged,
            prompts.block_tables,
            *sizes,
            prompts.max_num_keys,
            prompts.total_keys,
            layer.scale,
            key_scale=layer.key_scale,
            reduction=self.reduction,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
        )
        num_kv_heads = layer.paged.num_heads
        unpooled = None
        if prompts.pools:
            unpooled = torch.empty(num_kv_heads, scores.shape[1], device=scores.device)
        pooled = pool_per_kv_head(
            scores,
            num_kv_heads,
            *sizes,
            prompts.kernels,
            prompts.max_num_keys,
            unpooled,
            self.reduction,
        )
        return KeyScores(pooled, unpooled)

    def over_heads(self, scores: Tensor) -> Tensor:
        return per_kv_head(scores, 1, self.reduction)
