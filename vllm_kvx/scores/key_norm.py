"""Keys of small norm score high: Knorm."""

from vllm_kvx.ops.prompt.key_norms import key_scores
from vllm_kvx.scores.base import KeyScores, LayerView, Score, ScoredPrompts


class KeyNorm(Score):
    """The smaller the L2 norm of the key, the higher its score (Devoto et al., arXiv 2406.11430).

    No query is asked. Rotary embedding leaves a key's norm as it is.
    """

    def score(self, prompts: ScoredPrompts, layer: LayerView) -> KeyScores:
        return KeyScores(
            key_scores(
                layer.paged,
                prompts.block_tables,
                prompts.num_keys,
                prompts.offsets,
                prompts.max_num_keys,
                prompts.total_keys,
            )
        )
