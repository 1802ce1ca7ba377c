"""What a cache of 8-bit integers holds, with a scale for each token and head."""

from typing import Any

import pytest
from torch import Tensor

from vllm_kvx.ops.retrieval.backends import BACKEND_VARIABLE
from vllm_kvx.worker.int8_cache.backend import Int8MetadataBuilder

NAME = "int8_per_token_head"


def rounded(entries: Tensor) -> Tensor:
    """(..., D) as it is read again: the largest channel of a token and head is 127 steps."""
    steps = (entries.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-6)
    return (entries / steps).round().clamp(-128, 127) * steps


def read_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that decode read entries as they are stored, by Triton's kernels, as on a GPU."""
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    builder: Any = Int8MetadataBuilder
    init = builder.__init__

    def one_row_as_stored(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.short = 1

    monkeypatch.setattr(builder, "__init__", one_row_as_stored)
