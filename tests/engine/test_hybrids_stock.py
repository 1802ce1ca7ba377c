"""Stock vLLM on every hybrid answers as the dense reference does.

Prompts are longer than the window and than a chunk. What a policy answers can be no nearer to a
reference than this.
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
    complete_cpu_rotary(monkeypatch)
    complete_cpu_router(monkeypatch)
    run_delta_rule_in_float32(monkeypatch)
    keep_transformers_classes(monkeypatch)
    forget_ranks()
    model = hybrids.build(tmp_path, name)
    with running(model, None, max_model_len=512) as engine:
        answers = engine.generate(prompts_of((40, 97, 230)), max_tokens=8)
    assert_parity(model, answers, Speed(), most=0)
