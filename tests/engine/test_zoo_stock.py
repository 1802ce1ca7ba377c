"""Stock vLLM on every architecture of the zoo answers as the dense reference does.

What a policy answers can be no nearer to a reference than this.
"""

from pathlib import Path

import pytest
from reference import zoo
from support.cpu_router import complete_cpu_router
from support.engine import forget_ranks, running
from support.expected import Speed
from support.nightly import by_day
from support.parity import assert_parity
from support.prompts import prompts_of
from support.transformers_backend import keep_transformers_classes

NAMES = tuple(zoo.ZOO)


@pytest.mark.parametrize("name", by_day(NAMES, ()))
def test_stock_is_the_reference(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete_cpu_router(monkeypatch)
    keep_transformers_classes(monkeypatch)
    forget_ranks()
    model = zoo.build(tmp_path, name)
    with running(model, None, max_model_len=512) as engine:
        answers = engine.generate(prompts_of((41, 173)), max_tokens=8)
    assert_parity(model, answers, Speed())
