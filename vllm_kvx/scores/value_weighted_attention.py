"""Attention first, then attention weighted by what a value does to the output: CriticalKV."""

import torch
from torch import Tensor

from vllm_kvx.ops.prompt.two_stages import EPSILON, two_stage_scores
from vllm_kvx.ops.prompt.value_norms import value_norms
from vllm_kvx.scores.base import KeyScores, LayerView, ScoredPrompts
from vllm_kvx.scores.window_attention import WindowAttention


class ValueWeightedAttention(WindowAttention):
    """CriticalKV's two stages (arXiv 2502.03805, Algorithm 1) in one score for each key.

    The keys that attention alone would keep in half of the budget have an infinite score; the
    others have their attention times the norm of their projected value.
    """

    def score(self, prompts: ScoredPrompts, layer: LayerView) -> KeyScores:
        attention, unpooled, _ = super().score(prompts, layer)
        scores = two_stage_scores(
            attention,
            unpooled,
            _norms(prompts, layer),
            prompts.num_keys,
            prompts.windows,
            prompts.caps,
            prompts.offsets,
            group=layer.query.shape[1] // layer.paged.num_heads,
        )
        return KeyScores(scores, unpooled)


class SharedValueWeightedAttention(WindowAttention):
    """The same two stages where all heads keep the same keys.

    Attention is added up over the heads, and so are the products: what a head would lose of a key
    is in its own part of the output. The stages are told apart only then.
    """

    def score(self, prompts: ScoredPrompts, layer: LayerView) -> KeyScores:
        attention, unpooled, _ = super().score(prompts, layer)
        group = layer.query.shape[1] // layer.paged.num_heads
        # With the number of keys given, nothing here waits for the device.
        added = torch.repeat_interleave(
            prompts.windows * (EPSILON * group), prompts.num_keys, output_size=prompts.total_keys
        )
        return KeyScores(attention, unpooled, (attention + added) * _norms(prompts, layer))

    def settled(self, total: KeyScores, prompts: ScoredPrompts) -> KeyScores:
        attention, unpooled, products = total
        assert products is not None
        scores = two_stage_scores(
            attention,
            unpooled,
            products,
            prompts.num_keys,
            prompts.windows,
            prompts.caps,
            prompts.offsets,
            group=None,
        )
        return KeyScores(scores, unpooled)


def _norms(prompts: ScoredPrompts, layer: LayerView) -> Tensor:
    """(G, total_keys) float32 norms of projected values."""
    assert layer.value_factors is not None, "the layout has room for value norms"
    return value_norms(
        layer.paged,
        layer.value_factors,
        prompts.block_tables,
        prompts.num_keys,
        prompts.offsets,
        prompts.max_num_keys,
        prompts.total_keys,
    )
