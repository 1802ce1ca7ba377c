"""Every family of scores. A new one is its file and a row here."""

from vllm_kvx.scores.base import Score
from vllm_kvx.scores.window_attention import WindowAttention

SCORES: dict[str, Score] = {
    "window_attention": WindowAttention(),
}
