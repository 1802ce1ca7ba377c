"""Positions of a decoder with several a token, of which rotary embeddings take turns (M-RoPE)."""

from typing import NamedTuple, Self

from torch import Tensor
from vllm.config import VllmConfig


class PositionRows(NamedTuple):
    """How a decoder takes its positions.

    rows: positions a token, R. stride: from row to row in memory, which compiled code relies on.
    """

    rows: int
    stride: int

    @classmethod
    def of_model(cls, vllm_config: VllmConfig) -> Self | None:
        """Those of the configured model; None where a token has one position."""
        if not vllm_config.model_config.uses_mrope:
            return None
        # As in vLLM's own buffer (``RopeState``), which the stock decoder is compiled for.
        stride = vllm_config.scheduler_config.max_num_batched_tokens + 1
        return cls(vllm_config.model_config.mrope_num_dims, stride)

    def of(self, positions: Tensor) -> Tensor:
        """(R, N) of (N,) positions of a text, whose rows are equal; N is less than the stride."""
        buffer = positions.new_empty(self.rows, self.stride)[:, : len(positions)]
        return buffer.copy_(positions)
