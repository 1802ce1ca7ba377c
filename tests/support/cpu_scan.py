"""vLLM's Mamba 2 scan on CPU, completed for tests.

With prefix caching, vLLM stores the state at a block's end out of the middle of a prefill: it asks
the scan for the states at the ends of all chunks. vLLM 0.32's CPU scan returns those of sequences
alone, which then are indexed as chunks: an IndexError, or another request's state. GPU kernels
return what is asked.
"""

from typing import Any

import pytest
import torch
from torch import Tensor


def complete_cpu_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test's end, the scan returns the states of chunks where it is asked to."""
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    stock = ssd_combined._mamba_chunk_scan_combined_fwd

    def scan(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, size: int, out: Tensor, **more: Any
    ) -> Tensor:
        if not more.get("return_intermediate_states"):
            return stock(x, dt, A, B, C, size, out, **more)
        ends, of = more["cu_chunk_seqlens"].tolist(), more["seq_idx"].tolist()
        initial = more["initial_states"]
        states: list[Tensor] = []
        for chunk, sequence in enumerate(of):
            rows = slice(ends[chunk], ends[chunk + 1])
            before = None if initial is None else initial[sequence][None]
            if chunk and of[chunk - 1] == sequence:
                before = states[-1]
            bounds = torch.tensor([0, rows.stop - rows.start])
            gate = None if more["z"] is None else more["z"][rows]
            changed = {"initial_states": before, "cu_seqlens": bounds, "z": gate}
            one = (x[rows], dt[rows], A, B[rows], C[rows], size, out[rows])
            states.append(stock(*one, **(more | changed)))
        return torch.cat(states)

    monkeypatch.setattr(ssd_combined, "_mamba_chunk_scan_combined_fwd", scan)
