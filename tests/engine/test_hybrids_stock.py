"""Stock vLLM on every hybrid answers as the dense reference does, with and without a prefix hit.

Prompts are longer than the window and than a chunk. What a policy answers can be no nearer to a
reference than this. What vLLM's CPU build lacks, `tests/support` completes.
"""

from pathlib import Path

import pytest
from reference import hybrids
from support.cpu_delta_rule import run_delta_rule_in_float32
from support.cpu_rotary import complete_cpu_rotary
from support.cpu_router import complete_cpu_router
from support.engine import forget_ranks, running
from support.expected import Speed
from support.nightly import by_day
from support.parity import assert_parity
from support.prompts import prompts_of
from support.transformers_backend import keep_transformers_classes

NAMES = tuple(hybrids.HYBRIDS)


@pytest.mark.parametrize("name", by_day(NAMES, {NAMES.index("gemma3_text")}))
def test_stock_is_the_reference(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "qwen3_5_text":
        pytest.importorskip("torchvision", reason="vLLM's module of Qwen3.5 imports it")
    complete_cpu_rotary(monkeypatch)
    complete_cpu_router(monkeypatch)
    run_delta_rule_in_float32(monkeypatch)
    keep_transformers_classes(monkeypatch)
    forget_ranks()
    model = hybrids.build(tmp_path, name)
    prompts = prompts_of((40, 97, 230))
    with running(model, None, max_model_len=512, enable_prefix_caching=True) as engine:
        answers = engine.generate(prompts, max_tokens=8)
        again = engine.generate([[*prompt, 7, 8, 9] for prompt in prompts], max_tokens=4)
        engine.assert_idle()
    print("HITS", name, [a.cached for a in again])
    assert_parity(model, [*answers, *again], Speed(), most=0)
