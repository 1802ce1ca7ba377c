"""Stock vLLM on every hybrid answers as the dense reference does, with and without a prefix hit.

Prompts are longer than the window and than a chunk. What a policy answers can be no nearer to a
reference than this.
"""

from pathlib import Path

import pytest
from reference import hybrids
from support.cpu_hybrids import complete_cpu_hybrids
from support.engine import running
from support.expected import Speed
from support.nightly import by_day
from support.parity import assert_parity
from support.prompts import prompts_of

NAMES = tuple(hybrids.HYBRIDS)


@pytest.mark.parametrize("name", by_day(NAMES, ()))
def test_stock_is_the_reference(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "qwen3_5_text":
        pytest.importorskip("torchvision", reason="vLLM's module of Qwen3.5 imports it")
    complete_cpu_hybrids(monkeypatch)
    model = hybrids.build(tmp_path, name)
    prompts = prompts_of((40, 97, 230))
    with running(model, None, max_model_len=512, enable_prefix_caching=True) as engine:
        answers = engine.generate(prompts, max_tokens=8)
        again = engine.generate([[*prompt, 7, 8, 9] for prompt in prompts], max_tokens=4)
        engine.assert_idle()
    # A recurrent layer's state is kept at the end of larger blocks.
    assert all(answer.cached for answer in again[1:])
    assert_parity(model, [*answers, *again], Speed(), most=0)
