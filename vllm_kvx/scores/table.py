"""Every family of scores. A new one is its file and a row here."""

from vllm_kvx.scores.base import Score
from vllm_kvx.scores.key_norm import KeyNorm
from vllm_kvx.scores.value_weighted_attention import (
    SharedValueWeightedAttention,
    ValueWeightedAttention,
)
from vllm_kvx.scores.window_attention import WindowAttention

SCORES: dict[str, Score] = {
    "key_norm": KeyNorm(),
    "shared_value_weighted_attention": SharedValueWeightedAttention(),
    "value_weighted_attention": ValueWeightedAttention(),
    "window_attention": WindowAttention(),
    "window_maximum": WindowAttention("max"),
}
