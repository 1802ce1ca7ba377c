"""Two ranks select, store and answer what one does."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import assert_matches, prompts_of, running


def test_tp2_equals_reference(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM binds one rank to a NUMA node unless told which cores to take.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model = tiny()
    prompts = prompts_of((2, 33, 97, 200))
    policies = [None, "full", None, None]
    with running(model, "speed-4", tensor_parallel_size=2, enable_prefix_caching=True) as engine:
        answers = engine.generate(prompts, policies=policies)
        again = engine.generate([prompts[3] + [5, 6, 7]])
        engine.assert_idle()
    assert_matches(model, [answers[0], *answers[2:], *again], cutoff=4)
    assert_matches(model, answers[1:2], cutoff=None)
    assert again[0].cached == 192
