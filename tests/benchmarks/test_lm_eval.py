"""Our tasks as lm-eval's: what it reads, and how it scores."""

import json
from pathlib import Path

import pytest
from support.models import LOOKUP

from benchmarks.answers.lm_eval import record, score, write
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


def answer_as_both(folder: Path, policy: str, name: str, texts: list[str]) -> None:
    """Writes files as the two programs do: lm-eval under `policy`, evaluate under its short name.

    texts: lm-eval's answers; evaluate's are those, but for the last, which is its own.
    """
    theirs, ours = folder / "lm-eval" / name.replace(":", "_") / "model", folder / "evaluate"
    theirs.mkdir(parents=True)
    ours.mkdir(exist_ok=True)
    samples, answers = [], []
    for i, text in enumerate(texts):
        options = {"gen_args_0": {"arg_1": {"vllm_xargs": {"kv_policy": policy}}}}
        doc = {"index": i, "references": [f"value {i}"]}
        scored = {"resps": [[text]], "score": i / 2}
        samples.append({"doc": doc, "arguments": options, **scored})
        text = text if i + 1 < len(texts) else "another"
        answers.append({"question": {"policy": name, "index": i}, "text": text, "score": 1.0})
    (theirs / "samples_kvx.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    (theirs / "results_kvx.json").write_text(json.dumps({"lm_eval_version": "0.4"}))
    with (ours / "answers.jsonl").open("a") as file:
        file.writelines(json.dumps(answer) + "\n" for answer in answers)


def test_answers_of_both_are_one_file(tmp_path: Path) -> None:
    answer_as_both(tmp_path, "full", "full", ["a", "b"])
    answer_as_both(tmp_path, "fier-64:dense_below=0", "fier-64", ["a", "c"])
    facts = {
        **{"model": "m", "tasks": ["notes_3"], "lengths": [1024], "samples": 2, "seed": 0},
        "resolved": {"full": "full", "fier-64": "fier-64:dense_below=0"},
    }
    (tmp_path / "evaluate" / "run.json").write_text(json.dumps(facts))
    made = record.record(tmp_path / "lm-eval", tmp_path / "evaluate", ["first", "second"])
    assert made["about"]["command"] == ["first", "second"]
    assert made["about"]["versions"]["lm_eval"] == "0.4"
    assert made["task"] == "notes_3, 1,024 tokens, seed 0"
    assert list(made["policies"]) == ["full", "fier-64:dense_below=0"]
    row = made["policies"]["fier-64:dense_below=0"]
    assert (row["n"], row["lm_eval"], row["evaluate"], row["same_answers"]) == (2, 0.25, 1.0, 1)
    last = {"index": 1, "value": "value 1", "lm_eval": ("c", 0.5), "evaluate": ("another", 1.0)}
    assert row["answers"][1] == last

    (tmp_path / "lm-eval" / "full" / "model" / "samples_kvx.jsonl").write_text("")
    with pytest.raises(ValueError, match="not asked question 0 under full, 1 under full"):
        record.record(tmp_path / "lm-eval", tmp_path / "evaluate", ["first"])
