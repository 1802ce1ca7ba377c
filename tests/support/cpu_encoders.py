"""Encoders of images on CPU, for tests of what is behind them."""

import pytest


def spare_position_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test's end Qwen3-VL's encoder takes vLLM's torch code for its positions.

    vLLM's kernel launches a program for each patch of an image, which is interpreted.
    """
    from vllm.model_executor.models import qwen3_vl

    monkeypatch.setattr(qwen3_vl, "HAS_TRITON", False)
