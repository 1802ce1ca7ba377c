"""Which policies can be told apart, against bootstraps that are enumerated."""

import random
from itertools import product

import pytest

from vllm_kvx.tools.evaluate import report
from vllm_kvx.tools.evaluate.differences import differences
from vllm_kvx.tools.evaluate.intervals import of_difference
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.store import Answer, QuestionId
from vllm_kvx.tools.evaluate.summary import PERPLEXITY, Summary

Pairs = list[tuple[float, float]]


def enumerated(pairs: Pairs) -> tuple[float, float]:
    """The ends of the middle 95% of all n ** n resamples of n pairs."""
    means = sorted(
        sum(first - second for first, second in drawn) / len(pairs)
        for drawn in product(pairs, repeat=len(pairs))
    )
    return means[int(0.025 * len(means))], means[int(0.975 * len(means))]


@pytest.mark.parametrize(
    "pairs",
    [
        [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.5, 0.25)],
        [(1.0, 0.0), (1.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.0, 0.0)],
        [(0.1, 0.7), (0.35, 0.3), (0.0, 0.9), (1.0, 0.8), (0.6, 0.6), (0.2, 0.5)],
    ],
)
def test_the_bootstrap_against_all_resamples(pairs: Pairs) -> None:
    found = of_difference(pairs)
    low, high = enumerated(pairs)
    assert found.value == pytest.approx(sum(a - b for a, b in pairs) / len(pairs))
    # 2,000 of all resamples: an end may be the next of the means that there are.
    assert found.low == pytest.approx(low, abs=0.06) and found.high == pytest.approx(high, abs=0.06)


def test_what_both_find_hard_is_in_no_difference() -> None:
    rng = random.Random(0)
    hard = [float(rng.random() < 0.5) for _ in range(200)]
    pairs = [(score, score * (index % 10 > 0)) for index, score in enumerate(hard)]
    found = of_difference(pairs)
    # Two unpaired means would differ by 0.1 to each side.
    assert 0 < found.low < found.value < found.high < 0.1


@pytest.mark.parametrize(("score", "count"), [(0.0, 4), (1.0, 4), (0.5, 100)])
def test_prompts_that_agree_have_a_width(score: float, count: int) -> None:
    found = of_difference([(score, 0.0)] * count)
    assert found.value == score and found.low < found.high <= 1.0
    assert found.high - found.low < (1.1 if count < 10 else 0.08)


def test_two_questions_over_a_text_are_drawn_together() -> None:
    rng = random.Random(0)
    one = [(1.0, float(rng.random() < 0.7)) for _ in range(60)]
    texts = list(range(60))
    # Asked twice, they say nothing new.
    assert of_difference(one * 2, texts * 2) == pytest.approx(of_difference(one), abs=1e-12)
    alone = of_difference(one * 2)
    assert alone.high - alone.low < 0.8 * (of_difference(one).high - of_difference(one).low)
    assert QuestionId("notes/turn2", 512, 1).text == QuestionId("notes", 512, 1).text


def answer(policy: str, index: int, score: float, task: str = "notes") -> Answer:
    return Answer(Row(policy), QuestionId(task, 512, index), score, 509, 1.0, 1.0, "x")


def test_pairs_of_rows() -> None:
    answers = []
    for index in range(20):
        answers += [
            answer("full", index, 1.0),
            answer("fier-64", index, float(index > 0)),
            answer("snapkv", index, float(index % 2)),
        ]
    # Answered alone, and by perplexity, they are no pair.
    answers += [answer("snapkv", 99, 1.0), answer("full", 0, 3.0, PERPLEXITY)]
    summary = Summary(answers)
    found = {(str(d.better), str(d.worse)): d for d in differences(summary)}
    assert list(found) == [("full", "fier-64"), ("full", "snapkv"), ("fier-64", "snapkv")]
    assert [d.is_significant for d in found.values()] == [False, True, True]
    close = found["full", "fier-64"]
    assert (close.count, close.differ, close.by.value) == (20, 1, pytest.approx(0.05))
    written = report.as_json(summary, {})
    assert [each["significant"] for each in written["differences"]] == [False, True, True]
    text = report.text(summary)
    (line,) = (line for line in text.splitlines() if line.startswith("fier-64  snapkv"))
    assert line.endswith("told apart") and "+45.0 [" in line
    kept = [each["scores"] for each in written["scores"] if each["policy"] == "snapkv"]
    assert kept[0].split()[:4] == ["0", "1", "0", "1"] and kept[0].endswith("- - 1")
