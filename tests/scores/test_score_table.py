"""Every score that a method names is there, and no retention goes without one."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from vllm_kvx.policy.axes import Positions, Propagate, Retain, ScoreSpec
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.scores.table import SCORES

# Parameters without which a method's name is not complete.
NUMBERS = {
    **{"speed": "-4", "swiftkv": "-4", "selfonly": "-4"},
    **{"fier": "-64", "quest": "-64", "gemfilter": ":layer=3"},
}


@pytest.mark.parametrize("name", METHODS)
def test_families_have_a_row(name: str) -> None:
    (part,) = parse_policy(name + NUMBERS.get(name, "")).parts
    specs = []
    if isinstance(part, Propagate) and part.selects_by is not None:
        specs.append(part.selects_by)
    if isinstance(part, Retain):
        assert isinstance(part.keeps_by, ScoreSpec | Positions)
        specs += [part.keeps_by] if isinstance(part.keeps_by, ScoreSpec) else []
    for spec in specs:
        assert spec.family in SCORES


def test_a_retention_without_a_score_cannot_be_made() -> None:
    @dataclass(frozen=True)
    class Forgetful(Retain):
        name: ClassVar[str] = "forgetful"

        def kept(
            self, prompt_len: int, rows: int, layer: int, block_size: int, num_layers: int
        ) -> int:
            return 1

    with pytest.raises(TypeError, match="keeps_by"):
        Forgetful()  # type: ignore[abstract]


def test_carried_scores_decay() -> None:
    score = SCORES["window_attention"]
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    total = score.carry(None, first, 0.5)
    total = score.carry(total, second, 0.5)
    assert total.tolist() == [3.5, 5.0] and first.tolist() == [1.0, 2.0]
