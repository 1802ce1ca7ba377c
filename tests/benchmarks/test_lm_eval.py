"""Our tasks as lm-eval's: what it reads, and how it scores."""

import json
from pathlib import Path

import pytest
from support.models import LOOKUP

from benchmarks.answers.lm_eval import score, write
from vllm_kvx.errors import ToolError


@pytest.mark.parametrize("task", ["notes_3", "niah_multivalue"])
def test_answers_score_as_in_evaluate(task: str, tmp_path: Path) -> None:
    suite = write.suite_of(task, [800, 700], samples=2, seed=3)
    written = write.write(suite, str(LOOKUP), tmp_path)
    text = written.read_text()
    data = tmp_path / f"{task}.jsonl"
    assert f"task: kvx_{task}\n" in text and f'test: "{data}"\n' in text
    assert f"max_gen_toks: {suite.longest_answer}\n" in text
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    keys = [(row["length"], row["index"]) for row in rows]
    assert keys == [(700, 0), (700, 1), (800, 0), (800, 1)]
    for row in rows:
        right = " ".join(row["references"])
        assert score.process_results(row, [f" {right}."]) == {"score": 1.0}
        # All but the first word of the one value, or the first of four values.
        part = right.split(" ", 1)[1]
        assert score.process_results(row, [part])["score"] == pytest.approx(
            2 / 3 if task == "notes_3" else 3 / 4
        )
        assert score.process_results(row, ["nothing"]) == {"score": 0.0}


@pytest.mark.parametrize("task", ["quick", "perplexity", "longbench_qasper", "nots"])
def test_other_tasks_are_refused(task: str) -> None:
    with pytest.raises(ToolError, match=task):
        write.suite_of(task, [700], samples=1, seed=0)
