"""`vllm-kvx recommend`: what it asks, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models import LOOKUP

from vllm_kvx.cli import main
from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate.questions import Suite
from vllm_kvx.tools.recommend.command import text_of
from vllm_kvx.tools.recommend.questions import Questions
from vllm_kvx.tools.tasks.own_prompts import OwnPrompts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(LOOKUP)


def test_rounds_ask_whole_samples_and_each_once() -> None:
    suite = Suite.of(["notes", "notes_3"], None, lengths=(320,), samples=None, seed=3)
    questions = Questions(suite, 8, tokenizer)
    assert (questions.count, questions.first, questions.rounds) == (8, 8, 1)
    (only,) = questions
    assert [q.index for q in only.asked if q.task == "notes"] == [0, 1, 2, 3]
    questions = Questions(suite, 24, tokenizer)
    assert (questions.count, questions.first, questions.rounds) == (24, 16, 2)
    first, second = questions
    assert [len(each.new) for each in (first, second)] == [16, 8]
    assert len(second.asked) == 24 and list(first.asked.items()) == list(second.asked.items())[:16]
    # Later samples are those of one longer run.
    whole = replace(suite, samples=12).prepare(tokenizer, lambda done, total: None)
    assert whole == second.asked
    # Made once, for every engine.
    assert [each.asked for each in questions][1] == second.asked
    assert questions.context() == 320 + suite.longest_answer and questions.median == 320


def own(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_own_prompts_are_asked_in_an_order_of_the_seed(tmp_path: Path) -> None:
    lines = [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(20)]
    task = OwnPrompts(own(tmp_path, *lines))
    assert task.score("It is 3, I say.", task.samples()[3]) == 1
    assert task.score("four", task.samples()[4]) == 0
    suite = Suite((), (task,), False, (32,), None, 7)
    questions = Questions(suite, 18, tokenizer)
    assert (questions.count, questions.rounds) == (18, 2)
    first, last = questions
    indices = [question.index for question in last.asked]
    assert sorted(indices) != indices and len(set(indices)) == 18 and len(first.asked) == 16
    for question, prepared in last.asked.items():
        assert prepared.sample is not None
        assert prepared.sample.references == (str(question.index),)
    several = {"prompt": "p", "answers": ["Paris", "Lutetia"]}
    task = OwnPrompts(own(tmp_path, several))
    assert task.score("lutetia!", task.samples()[0]) == 1


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([{"prompt": "a", "answer": "b"}, {"prompt": "c"}], 'line 2: it has neither "answer"'),
        ([{"prompt": "a", "answer": "b", "answers": ["c"]}], "line 1: it has both"),
        ([{"prompt": "a", "answer": " "}], "line 1: an answer is empty"),
        ([{"prompt": "a", "answer": 3}], 'line 1: "answer" is 3; it must be a string'),
        ([{"prompt": "a", "answers": []}], 'line 1: "answers" is []'),
        ([{"answer": "b"}], 'line 1: the field "prompt" is missing'),
        ([["a", "b"]], "line 1: it is no JSON object"),
        ([], "holds no prompts"),
    ],
)
def test_prompts_need_answers(
    tmp_path: Path, lines: list[Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recommend", str(LOOKUP), "--prompts", str(own(tmp_path, *lines))]) == 2
    err = capsys.readouterr().err
    assert err.startswith("vllm-kvx recommend: error: ") and says in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--keep", "1.2"], "above 0 and at most 1, such as 0.97; got 1.2"),
        (["--keep", "0"], "above 0 and at most 1"),
        (["--keep", "most"], "above 0 and at most 1"),
        (["--time-limit", "0"], "must be minutes above 0"),
        (["--time-limit", "soon"], "must be minutes above 0"),
        (["--device", "abacus"], "invalid choice"),
        (["--input", "0"], "must be at least 1"),
    ],
)
def test_bad_options(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["recommend", "m", *argv])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--keep", "1"], "use --keep 0.99"),
        (["--samples", "8"], "--samples 8: even a policy that keeps every answer"),
        (["--input", "999999"], "more than the model's context of"),
        (["--tasks", "nothing"], "nothing"),
        (["--tasks", "perplexity"], "no perplexity"),
        (["--policies", "full"], "no policy of the ladder runs on this model and gains"),
        (["--prompts", "no-such-file.jsonl"], "cannot read prompts from no-such-file.jsonl"),
        (["--prompts", __file__.replace(".py", ".txt")], "cannot read prompts"),
    ],
)
def test_what_cannot_be_done_is_said_before_an_engine_starts(
    argv: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ["--results", str(tmp_path / "results")]
    assert main(["recommend", str(LOOKUP), *results, *argv]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("vllm-kvx recommend: error: ") and says in err
    assert not (tmp_path / "cache" / "recommendation").exists() or not list(
        (tmp_path / "cache" / "recommendation").iterdir()
    )


def test_texts_have_no_answers(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("a\n---\nb\n")
    with pytest.raises(ToolError, match=r"texts have no answers: a line is \{"):
        OwnPrompts(path)


def test_few_prompts_show_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt": f"p{i}", "answer": "b"} for i in range(20)]
    argv = ["--prompts", str(own(tmp_path, *lines)), "--results", str(tmp_path / "results")]
    assert main(["recommend", str(LOOKUP), *argv]) == 2
    assert "20 prompts are too few" in capsys.readouterr().err


def test_other_prompts_of_the_same_name_are_another_run(tmp_path: Path) -> None:
    first = text_of(own(tmp_path, {"prompt": "p", "answer": "a"}))
    assert text_of(own(tmp_path, {"prompt": "p", "answer": "a"})) == first
    assert text_of(own(tmp_path, {"prompt": "p", "answer": "b"})) != first
