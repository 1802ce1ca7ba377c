"""What a forward pass runs, step by step, as vLLM warms up, captures and replays.

CUDA graphs need a GPU; which of the two decoders a pass goes through does not.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .conftest import running


def test_first_segment_is_captured_beside_the_stock_decoder(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.forward_context import get_forward_context, set_forward_context
    from vllm.model_executor.models.llama import LlamaForCausalLM

    from vllm_kvx.models.decoder import StepPlan, StepRows

    with running(tiny(), "speed-4") as engine:
        model, config = engine.runner.model, engine.llm.llm_engine.vllm_config
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
        model.segments[0].forward = segment

        def passes(*modes: CUDAGraphMode, size: int = 4) -> list[str]:
            ran.clear()
            for mode in modes:
                with set_forward_context({}, config, num_tokens=size, cudagraph_runtime_mode=mode):
                    model(torch.zeros(size, dtype=torch.long), torch.arange(size))
            return list(ran)

        # vLLM prepares once, warms up without graphs, then captures the pieces.
        model.begin_step(StepPlan([None, None], is_dummy=True))
        assert passes(CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE) == [
            "stock",
            "segment 0, PIECEWISE",
            "stock",
        ]
        # A FULL graph is captured around the plain forward pass.
        model.begin_step(StepPlan([None, None], is_dummy=True))
        assert passes(CUDAGraphMode.NONE) == ["stock"]
        # A middle chunk, none of whose rows goes on: graphs where they were captured, else none.
        none = torch.zeros(0, dtype=torch.long)
        for size, mode in ((4, "PIECEWISE"), (8, "NONE")):
            model.begin_step(StepPlan([None, StepRows(none, none, none, {})]))
            assert passes(CUDAGraphMode.PIECEWISE, size=size) == [f"segment 0, {mode}"]
        # A real batch that drops nothing.
        model.begin_step(StepPlan([None, None]))
        assert passes(CUDAGraphMode.PIECEWISE) == ["stock"]
