"""When `full` answers too little, a run ends before the policies are asked."""

from pathlib import Path

import pytest

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate import full_answers
from vllm_kvx.tools.evaluate.intervals import least_right, of_mean
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.store import Answer, QuestionId
from vllm_kvx.tools.evaluate.summary import PERPLEXITY, Summary


def summary_of(right: int, count: int, task: str = "notes", row: str = "full") -> Summary:
    return Summary(
        Answer(
            Row.parse(row), QuestionId(task, 512, index), float(index < right), 500, 1.0, 1.0, ""
        )
        for index in range(count)
    )


def test_the_least_number_tells_all_from_none() -> None:
    least = least_right()
    for count, apart in ((least - 1, False), (least, True), (least + 1, True)):
        assert (of_mean([1.0] * count).low > of_mean([0.0] * count).high) == apart


@pytest.mark.parametrize(
    ("right", "count", "too_few"),
    [
        (0, 1, True),
        (0, 6, True),
        (1, 6, True),
        (3, 100, True),
        (4, 6, False),
        (4, 100, False),
        # Few prompts are as they were asked for, as long as there is something to keep.
        (2, 2, False),
        (1, 3, False),
    ],
)
def test_too_few_right_answers(
    right: int, count: int, too_few: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = summary_of(right, count)
    if not too_few:
        full_answers.check(summary, tmp_path, keep_going=False, save=True)
        assert capsys.readouterr().out.startswith(f"full: {100 * right / count:.1f}% [")
        return
    with pytest.raises(ToolError) as refused:
        full_answers.check(summary, tmp_path, keep_going=False, save=True)
    said = str(refused.value)
    assert f"full has {right} of {count} answers right" in said and str(tmp_path) in said
    assert "no policy was asked and nothing is saved" in said
    # More prompts are no help where none is right.
    assert ("more --samples" in said) == (right > 0)
    # By task, so that one sees what it does answer.
    assert "policy  notes" in capsys.readouterr().out
    full_answers.check(summary, tmp_path, keep_going=True, save=False)
    assert "shares of full will say nothing" in capsys.readouterr().out


def test_perplexity_has_nothing_to_be_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full_answers.check(summary_of(0, 2, PERPLEXITY), tmp_path, keep_going=False, save=False)
    assert not capsys.readouterr().out
    answers = [*summary_of(0, 2, PERPLEXITY)._answers, *summary_of(0, 8)._answers]
    full_answers.check(Summary(answers), tmp_path, keep_going=False, save=False)
    assert "full has 0 of 8 answers right" in capsys.readouterr().out


def test_the_yardstick_of_a_tuned_model_is_its_original(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"^full \(original\) has 1 of 9 answers right"):
        summary = summary_of(1, 9, row="full (original)")
        full_answers.check(summary, tmp_path, keep_going=False, save=False)
