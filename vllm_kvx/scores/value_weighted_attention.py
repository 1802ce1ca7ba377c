"""Attention first, then attention weighted by what a value does to the output: CriticalKV."""

from vllm_kvx.ops.prompt.two_stages import two_stage_scores
from vllm_kvx.ops.prompt.value_norms import value_norms
from vllm_kvx.scores.base import KeyScores, LayerView, ScoredPrompts
from vllm_kvx.scores.window_attention import WindowAttention


class ValueWeightedAttention(WindowAttention):
    """CriticalKV's two stages (arXiv 2502.03805, Algorithm 1) in one score for each key.

    The keys that attention alone would keep in half of the budget have an infinite score; the
    others have their attention times the norm of their projected value.
    """

    def score(self, prompts: ScoredPrompts, layer: LayerView) -> KeyScores:
        assert layer.value_factors is not None, "the layout has room for value norms"
        attention, unpooled = super().score(prompts, layer)
        norms = value_norms(
            layer.paged,
            layer.value_factors,
            prompts.block_tables,
            prompts.num_keys,
            prompts.offsets,
            prompts.max_num_keys,
            prompts.total_keys,
        )
        scores = two_stage_scores(
            attention,
            unpooled,
            norms,
            prompts.num_keys,
            prompts.windows,
            prompts.caps,
            prompts.offsets,
            group=layer.query.shape[1] // layer.paged.num_heads,
        )
        return KeyScores(scores, unpooled)
