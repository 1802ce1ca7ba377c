"""Prompts with images where some layers keep a state, against the dense references."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from reference import hybrids
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.knorm import Norm
from reference.wrappers import add_processor
from support.cpu_hybrids import complete_cpu_hybrids
from support.engine import running
from support.expected import FULL, Policy, Read
from support.nightly import nightly
from support.parity import room_for
from support.pictures import Shown, ask, assert_parity_shown

NAME = "qwen3_5"
POLICIES: list[Policy] = [
    Keep(kv_rate=0.2),
    FULL,
    Read(Retrieve(64)),
    Critical(kv_rate=0.3),
    Norm(0.3),
    Read(Retrieve(64), Keep(kv_rate=0.5)),
]


@nightly
@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's module of it imports that")
def test_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks beside each other, and over cached prefixes, which end where a state is kept."""
    complete_cpu_hybrids(monkeypatch)
    model = add_processor(hybrids.wrap(tmp_path / "model", NAME), NAME)
    shown = [
        Shown.of(NAME, 20, (7, 9, 0), 60, seed=1),
        Shown.of(NAME, 40, (6, 8, 1), 50, seed=2),
        Shown.of(NAME, 30, (3, 5, 2), 70, (9, 8, 3), 20, seed=3),
        Shown.of(NAME, 5, (10, 10, 4), 30, seed=4),
        Shown.of(NAME, 130, seed=5),
        Shown.of(NAME, 33, (7, 9, 6), 64, seed=6),
    ]
    with running(
        model,
        "full",
        config=room_for(POLICIES),
        enable_prefix_caching=True,
        skip_tokenizer_init=False,
        max_model_len=512,
        limit_mm_per_prompt={"image": 2, "video": 0},
    ) as engine:
        answers = ask(engine, shown, POLICIES, 6)
        longer = [each._replace(prompt=[*each.prompt, 7, 8, 9]) for each in shown]
        again = ask(engine, longer, POLICIES, 4)
        engine.assert_idle()
    assert any(answer.cached for answer in again)
    assert_parity_shown(model, [*shown, *longer], [*answers, *again], POLICIES * 2)
