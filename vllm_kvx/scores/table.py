"""Every family of scores. A new one is its file and a row here."""

from vllm_kvx.scores.base import Score
from vllm_kvx.scores.key_norm import KeyNorm
from vllm_kvx.scores.window_attention import WindowAttention

SCORES: dict[str, Score] = {
    "key_norm": KeyNorm(),
    "window_attention": WindowAttention(),
    "window_maximum": WindowAttention("max"),
}
