"""Means, intervals and tables of answers."""

import math
import random

import pytest

from vllm_kvx.evaluation import report
from vllm_kvx.evaluation.figures import family_of
from vllm_kvx.evaluation.intervals import of_mean, of_ratio, of_values
from vllm_kvx.evaluation.store import Answer, Question
from vllm_kvx.evaluation.summary import PERPLEXITY, Summary


def test_wilsons_interval() -> None:
    # Newcombe (1998), Table I: 81 of 263 and 15 of 148, method 3.
    for right, of, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        found = of_mean([1.0] * right + [0.0] * (of - right))
        assert found.value == pytest.approx(right / of)
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert of_mean([1.0] * 6)[1:] == pytest.approx((0.6097, 1.0), abs=1e-4)
    assert of_mean([0.0])[1] == 0.0


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_an_interval_holds_its_value(score: float) -> None:
    """Rounding once left the ends beside it, and a plot takes no negative error."""
    for count in range(1, 200):
        found = of_mean([score] * count)
        assert found.low <= found.value <= found.high


def test_nothing_kept_of_a_few_prompts_is_no_proof() -> None:
    found = of_ratio([(0.0, 1.0)] * 6)
    assert found == pytest.approx((0.0, 0.0, 0.3903), abs=1e-4)


def test_ratios_are_paired() -> None:
    rng = random.Random(1)
    full = [float(rng.random() < 0.6) for _ in range(200)]
    # Loses a tenth of what full has right, and nothing else moves.
    kept = [score * (index % 10 > 0) for index, score in enumerate(full)]
    found = of_ratio(list(zip(kept, full, strict=True)))
    assert found is not None
    assert found.low < found.value == sum(kept) / sum(full) < found.high
    assert found.high - found.low < 0.12
    assert of_ratio([(0.0, 0.0), (1.0, 0.0)]) is None


def test_a_few_equal_prompts_prove_little() -> None:
    found = of_ratio([(1.0, 1.0)] * 6)
    assert found == pytest.approx((1.0, 0.6097, 1.0), abs=1e-4)


def test_an_interval_of_values() -> None:
    found = of_values([1.0, 2.0, 3.0, 4.0])
    assert found.value == 2.5
    assert found.high - found.value == pytest.approx(1.96 * math.sqrt(5 / 3 / 4), abs=1e-3)
    assert of_values([2.0]) == (2.0, 2.0, 2.0)


def answers() -> list[Answer]:
    found = []
    for policy, score, kept in (("full", 1.0, 1.0), ("snapkv", 0.5, 0.1)):
        for length in (512, 1024):
            for index in range(4):
                question = Question(policy, "notes", length, index)
                right = score if length == 512 else score * (index % 2)
                found.append(Answer(question, right, length - 3, kept, kept, "x"))
        question = Question(policy, PERPLEXITY, 512, 0)
        found.append(Answer(question, 2.0 + (policy != "full"), 512, kept, kept, ""))
    return found


def test_cells() -> None:
    summary = Summary(answers(), ["full", "quest-64", "snapkv"])
    assert summary.policies == ["full", "snapkv"] and summary.lengths == [512, 1024]
    cell = summary.cell("snapkv")
    assert cell is not None and cell.of_full is not None
    assert (cell.count, cell.score.value, cell.kept) == (8, 0.375, 0.1)
    assert cell.of_full.value == 0.5 and cell.tokens == (509 + 1021) / 2
    short = summary.cell("snapkv", "notes", 512)
    assert short is not None and short.count == 4 and short.score.value == 0.5
    assert summary.cell("snapkv", "other") is None
    lost = summary.cell("snapkv", PERPLEXITY)
    assert lost is not None and lost.of_full is not None
    assert lost.score.value == 3.0 and lost.of_full.value == 1.0


def test_tables() -> None:
    summary = Summary(answers())
    text = report.table(summary)
    head, full, snapkv = text.splitlines()[:3]
    assert head.split() == ["policy", "kept", "read", "512", "1,024", "all", "of", "full"]
    assert full.startswith("full") and "100.0 [51-100] n=4" in full
    assert snapkv.startswith("snapkv") and "50.0% [50.0-50.0]" not in snapkv
    assert "3.0000 (n=1)" in text and "+1.0000" in text
    by_task = report.task_table(summary).splitlines()
    assert by_task[0].split() == ["policy", "notes"] and by_task[-1].split() == ["n", "8"]
    written = report.as_json(summary, {"model": "m"})
    assert written["model"] == "m"
    (cell,) = (
        c
        for c in written["cells"]
        if (c["policy"], c["task"], c["length"]) == ("snapkv", "all", "all")
    )
    assert cell["score"][0] == 0.375 and cell["n"] == 8 and cell["of_full"][0] == 0.5


@pytest.mark.parametrize(
    ("policy", "family"),
    [
        ("snapkv:kv_rate=0.2", "snapkv"),
        ("fier-512", "fier"),
        ("fastkv:tsp_layer=16,kv_rate=0.05+fier-64", "fastkv:tsp_layer=16+fier"),
        ("speed-24", "speed"),
    ],
)
def test_a_curve_is_a_method(policy: str, family: str) -> None:
    assert family_of(policy) == family
