"""What a forward pass runs, step by step, as vLLM warms up, captures and replays.

CUDA graphs need a GPU; which of the two decoders a pass goes through does not.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.engine import running
from support.inside import Decoders


def test_first_segment_is_captured_beside_the_stock_decoder(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.models.llama import LlamaForCausalLM

    with running(tiny(), "speed-4") as engine:
        decoders = Decoders(engine)
        ran: list[str] = []
        hidden = torch.zeros(4, 64)

        def stock(*_args: object) -> torch.Tensor:
            ran.append("stock")
            return hidden

        def segment(*_args: object) -> tuple[torch.Tensor, torch.Tensor]:
            mode = get_forward_context().cudagraph_runtime_mode
            ran.append(f"segment 0, {mode.name}")
            return hidden, hidden

        monkeypatch.setattr(LlamaForCausalLM, "forward", stock)
        decoders.replace_first_segment(segment)

        def passes(*modes: CUDAGraphMode, size: int = 4) -> list[str]:
            ran.clear()
            for mode in modes:
                decoders.run(size, mode)
            return list(ran)

        # vLLM prepares once, warms up without graphs, then captures the pieces.
        decoders.begin_without_drops(is_dummy=True)
        assert passes(CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE) == [
            "stock",
            "segment 0, PIECEWISE",
            "stock",
        ]
        # A FULL graph is captured around the plain forward pass.
        decoders.begin_without_drops(is_dummy=True)
        assert passes(CUDAGraphMode.NONE) == ["stock"]
        # A middle chunk, none of whose rows goes on: graphs where they were captured, else none.
        for size, mode in ((4, "PIECEWISE"), (8, "NONE")):
            decoders.begin_middle_chunk()
            assert passes(CUDAGraphMode.PIECEWISE, size=size) == [f"segment 0, {mode}"]
        # A real batch that drops nothing.
        decoders.begin_without_drops()
        assert passes(CUDAGraphMode.PIECEWISE) == ["stock"]
