"""vLLM's rotary embedding on CPU, completed for tests.

vLLM 0.32's CPU kernel takes queries (n, H, D) for queries (n, D) of one head: it rotates them
wrongly. LFM2 gives it such ones; other models give (n, H * D). GPU kernels take both.
"""

from typing import Any

import pytest
from torch import Tensor


def complete_cpu_rotary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test's end, queries and keys may have a dimension for heads."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    stock = RotaryEmbedding.forward_cpu

    def forward(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, Tensor | None]:
        if positions.dim() > 1 or query.dim() < 3:
            return stock(self, positions, query, key, **more)
        flat = None if key is None else key.flatten(1)
        turned, turned_key = stock(self, positions, query.flatten(1), flat, **more)
        return turned.view(query.shape), None if key is None else turned_key.view(key.shape)

    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", forward)
