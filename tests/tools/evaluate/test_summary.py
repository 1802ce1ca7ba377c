"""Means, intervals and tables of answers."""

import math
import random

import pytest

from vllm_kvx.tools.evaluate import report
from vllm_kvx.tools.evaluate.figures import family_of, speed_points
from vllm_kvx.tools.evaluate.intervals import of_mean, of_ratio, of_values
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.store import Answer, QuestionId
from vllm_kvx.tools.evaluate.summary import PERPLEXITY, Summary


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
                question = QuestionId("notes", length, index)
                right = score if length == 512 else score * (index % 2)
                found.append(Answer(Row(policy), question, right, length - 3, kept, kept, "x"))
        question = QuestionId(PERPLEXITY, 512, 0)
        nats = 2.0 + (policy != "full")
        found.append(Answer(Row(policy), question, nats, 512, kept, kept, ""))
    return found


def test_cells() -> None:
    summary = Summary(answers(), list(map(Row, ["full", "quest-64", "snapkv"])))
    assert list(map(str, summary.rows)) == ["full", "snapkv"] and summary.lengths == [512, 1024]
    cell = summary.cell(Row.parse("snapkv"))
    assert cell is not None and cell.of_full is not None
    assert (cell.count, cell.score.value, cell.kept) == (8, 0.375, 0.1)
    assert cell.of_full.value == 0.5 and cell.tokens == (509 + 1021) / 2
    short = summary.cell(Row.parse("snapkv"), "notes", 512)
    assert short is not None and short.count == 4 and short.score.value == 0.5
    assert summary.cell(Row.parse("snapkv"), "other") is None
    lost = summary.cell(Row.parse("snapkv"), PERPLEXITY)
    assert lost is not None and lost.of_full is not None
    assert lost.score.value == 3.0 and lost.of_full.value == 1.0


def test_tables() -> None:
    summary = Summary(answers())
    text = report.table(summary)
    head, full, snapkv = text.splitlines()[:3]
    assert head.split() == [
        "policy",
        "kept",
        "read",
        "512",
        "1,024",
        "all",
        "of",
        "full",
        "difference",
    ]
    assert full.startswith("full") and "100.0 [51-100] n=4" in full
    assert snapkv.startswith("snapkv") and "50.0% [50.0-50.0]" not in snapkv
    assert "3.0000 (n=1)" in text and "+1.0000" in text
    by_task = report.task_table(summary).splitlines()
    assert by_task[0].split() == ["policy", "notes", "same"]
    assert by_task[-1].split() == ["n", "8"]
    written = report.as_json(summary, {"model": "m"})
    assert written["model"] == "m"
    (cell,) = (
        c
        for c in written["cells"]
        if (c["policy"], c["task"], c["length"]) == ("snapkv", "all", "all")
    )
    assert cell["score"][0] == 0.375 and cell["n"] == 8 and cell["of_full"][0] == 0.5
    assert cell["from_full"][0] == -0.375
    assert written["scores"][-2] == {
        **{"policy": "snapkv", "task": "notes", "length": 1024, "scores": "0 0.5 0 0.5"}
    }


def said(policy: str, index: int, text: str, task: str = "notes", tokens: int = 9) -> Answer:
    return Answer(Row.parse(policy), QuestionId(task, 512, index), 1.0, tokens, 1.0, 1.0, text)


def test_same_answers() -> None:
    full = ["a  cat ", "A dog.", "a cow", "7"]
    other = ["a cat", "a dog.", " a\ncow\n", "7 "]
    found = [said("full", index, text) for index, text in enumerate(full)]
    found += [said("snapkv", index, text) for index, text in enumerate(other)]
    # Nobody answered this one in full, and text that is given is not compared.
    found += [said("snapkv", 9, "a cat"), said("snapkv", 0, "x", PERPLEXITY)]
    summary = Summary(found)
    cell = summary.cell(Row.parse("snapkv"))
    assert cell is not None and cell.same is not None and cell.same.value == 0.75
    assert cell.same.low < 0.4
    lost = summary.cell(Row.parse("snapkv"), PERPLEXITY)
    assert lost is not None and lost.same is None
    head, full_row, row, _ = report.task_table(summary).splitlines()
    assert head.split()[-1] == "same" and full_row.split()[-1] == "100" and row.split()[-1] == "75"


def test_loops_are_of_tasks_with_long_answers() -> None:
    texts = ["no " * 40, "no " * 40 + "and one two three four five six seven eight", "once", "x"]
    found = [said("full", index, text) for index, text in enumerate(texts)]
    found += [said("full", index, "short", "words") for index in range(4)]
    summary = Summary(found)
    cells = [summary.cell(Row.parse("full"), task) for task in (None, "notes", "words")]
    assert [cell and cell.loops and cell.loops.value for cell in cells] == [0.25, 0.25, None]
    row = report.task_table(summary).splitlines()[1]
    assert row.split() == ["full", "100", "100", "100", "25.0"]
    loops = {c["task"]: c["loops"] for c in report.as_json(summary, {})["cells"]}
    assert loops["words"] is None and loops["notes"] == loops["all"] and loops["all"][0] == 0.25


def test_prompts_in_buckets() -> None:
    found = [said("full", tokens, "x", tokens=tokens) for tokens in (3, 512, 513, 1024, 4000)]
    summary = Summary(found)
    assert [(b.low, b.high) for b in summary.buckets] == [(1, 512), (513, 1024), (2049, 4096)]
    cells = [summary.cell(Row.parse("full"), bucket=bucket) for bucket in summary.buckets]
    assert [cell and cell.count for cell in cells] == [2, 2, 1]
    assert "2,049-4,096 tokens" in report.bucket_table(summary).splitlines()[0]
    assert [c["n"] for c in report.as_json(summary, {})["by_tokens"]] == [2, 2, 1]
    assert Summary([]).buckets == []


def test_short_questions_stand_in_the_last_column() -> None:
    found = [said("full", index, "x") for index in range(2)]
    found += [Answer(Row.parse("full"), QuestionId("short_facts", 0, 0), 0.0, 20, 1.0, 1.0, "x")]
    head, row = report.table(Summary(found)).splitlines()[:2]
    assert head.split()[3:] == ["512", "all", "of", "full", "difference"]
    assert "n=2" in row and "n=3" in row


@pytest.mark.parametrize(
    ("policy", "family"),
    [
        ("snapkv:kv_rate=0.2", "snapkv"),
        ("fier-512", "fier"),
        ("fier-512@fp8", "fier@fp8"),
        ("full@fp8 (original)", "full@fp8 (original)"),
        ("fastkv:tsp_layer=16,kv_rate=0.05+fier-64", "fastkv:tsp_layer=16+fier"),
        ("speed-24", "speed"),
        ("speed-24 (original)", "speed (original)"),
    ],
)
def test_a_curve_is_a_method(policy: str, family: str) -> None:
    assert family_of(Row.parse(policy)) == family


def test_speeds_are_of_the_same_kv_cache() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    names = ("full", "full@fp8", "fier-64", "fier-64@fp8")
    summary = Summary([said(name, 0, "x") for name in names])
    speed = {"stock@fp8": {"ttft": 1.1}, "fier-64@fp8": {"ttft": 1.3}}
    axis = speed_points(pyplot, summary, "m", speed).axes[0]
    assert {text.get_text(): text.xy[0] for text in axis.texts} == {
        "full": 1.0,
        "full@fp8": 1.1,
        "fier-64@fp8": 1.3,
    }
    pyplot.close()


def test_a_policy_that_dropped_nothing_is_told() -> None:
    # SwiftKV keeps and reads all, and other entries than full: it may lose answers.
    kept_by = {"full": 1.0, "snapkv": 1.0, "knorm": 0.9, "full@fp8": 1.0, "swiftkv-4": 1.0}
    summary = Summary(
        Answer(Row.parse(row), QuestionId("notes", 512, index), 1.0, 500, kept, kept, "")
        for row, kept in kept_by.items()
        for index in range(4)
    )
    (note,) = report.notes(summary)
    assert note.startswith("snapkv kept and read every entry") and note in report.table(summary)


@pytest.mark.parametrize(
    "name", ["snapkv:kv_rate=0.2,after=8", "fastkv:tsp_layer=3,kv_rate=0.2,after=8"]
)
def test_answers_that_end_before_retention_are_told(name: str) -> None:
    """By their tokens: beside propagation less than all is kept of any."""

    def notes(*generated: int | None) -> list[str]:
        summary = Summary(
            Answer(Row(row), QuestionId("notes", 512, index), 1.0, 500, 0.6, 0.6, "", count)
            for row in ("full", name)
            for index, count in enumerate(generated)
        )
        (whole,) = (
            {key: cell[key] for key in ("early", "untold") if key in cell}
            for cell in report.as_json(summary, {})["cells"]
            if (cell["policy"], cell["task"], cell["length"]) == (name, "all", "all")
        )
        early = sum(count is not None and count <= 9 for count in generated)
        counts = {"early": early, "untold": generated.count(None)}
        assert whole == {key: count for key, count in counts.items() if count}
        return report.notes(summary)

    assert notes(10, 40) == []
    assert notes(10, 9, 1) == [
        f"{name}: 2 of 3 answers ended within 9 tokens, before retention dropped anything."
    ]
    assert notes(9, 1) == [
        f"{name} retained nothing, since no answer has more than 9 tokens: ask for longer ones."
    ]
    (note,) = notes(10, None)
    assert note.startswith(f"{name}: 1 of 2 answers are of an older version")
