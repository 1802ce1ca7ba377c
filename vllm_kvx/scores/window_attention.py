"""Attention that keys get from the prompt's last queries: FastKV, SnapKV, PyramidKV, StructKV."""

from torch import Tensor

from vllm_kvx.ops.prompt.pool import pool_per_kv_head
from vllm_kvx.ops.prompt.saliency import window_saliency
from vllm_kvx.scores.base import LayerView, Score, ScoredPrompts


class WindowAttention(Score):
    """FastKV's and SnapKV's estimator; without pooling, StructKV's (Eq. 2).

    Softmax rows of the window's queries are summed over the queries, max-pooled over neighbouring
    keys, and summed over the query heads of each KV head.
    """

    def rate(self, prompts: ScoredPrompts, layer: LayerView) -> Tensor:
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
        )
        return pool_per_kv_head(
            scores, layer.paged.num_heads, *sizes, prompts.kernels, prompts.max_num_keys
        )
