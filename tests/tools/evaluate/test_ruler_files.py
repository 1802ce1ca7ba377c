"""RULER's own files: prompts, beginnings of answers, metrics, and files that are no good."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.models import LOOKUP

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate.questions import Suite, load_tokenizer
from vllm_kvx.tools.evaluate.store import QuestionId
from vllm_kvx.tools.tasks.base import FixedTask
from vllm_kvx.tools.tasks.ruler_files import RulerFile
from vllm_kvx.tools.tasks.table import group_of, tasks_named

ASKS = "What is the special magic uuid for 1e9b mentioned in the provided text?"
BEGINS = "The special magic uuid for 1e9b mentioned in the provided text is"
TEXT = (
    "A special magic uuid is hidden within the following text. Make sure to memorize it.\n"
    f"One of the special magic uuids for 1e9b is: c31e-DB.\n{ASKS}"
)
OLD = {"index": 0, "input": f"{TEXT} {BEGINS}", "outputs": ["c31e-db"], "length": 40}
NEW = {**OLD, "input": TEXT, "answer_prefix": f" {BEGINS}"}


def write(path: Path, *rows: "dict[str, Any] | str") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_answer_begins_as_the_file_says(tmp_path: Path) -> None:
    """Older files have the beginning in the prompt, newer ones may have it beside."""
    both = {**OLD, "answer_prefix": f" {BEGINS}"}
    task = RulerFile("ruler_niah_multikey_3-4096", write(tmp_path / "x.jsonl", OLD, NEW, both))
    assert task.max_tokens == 128 and task.chat and not task.is_short
    assert [(s.text, s.begins) for s in task.samples()] == [(TEXT, BEGINS)] * 3
    sample = task.samples()[0]
    assert task.score(" C31E-db.", sample) == 1 and task.score("c31e", sample) == 0


def test_metrics_by_kind(tmp_path: Path) -> None:
    row = {"input": "Text.\nFind all. Answer: They are: ", "outputs": ["red", "blue"]}
    path = write(tmp_path / "x.jsonl", row)
    for name, tokens, half in (
        *(("vt_8192", 30, 0.5), ("cwe", 120, 0.5), ("fwe", 50, 0.5)),
        *(("qa_1", 32, 1.0), ("qa", 32, 1.0)),
    ):
        task = RulerFile(f"ruler_{name}", path)
        (sample,) = task.samples()
        assert (sample.text, sample.begins) == ("Text.\nFind all.", "Answer: They are:")
        assert (task.max_tokens, task.score("blue", sample)) == (tokens, half), name
        assert task.score("green", sample) == 0


def test_files_of_a_folder(tmp_path: Path) -> None:
    """In one folder, or as RULER's scripts leave them."""
    write(tmp_path / "niah_multikey_3-4096.jsonl", OLD)
    write(tmp_path / "vt" / "validation.jsonl", OLD, OLD)
    names = ["ruler_niah_multikey_3-4096", "ruler_vt"]
    tasks = tasks_named(["notes", "ruler_files", names[1]], None, tmp_path)
    assert [task.name for task in tasks] == ["notes", *names]
    assert [len(t.samples()) for t in tasks if isinstance(t, FixedTask)] == [1, 2]
    assert group_of(names[0]) == group_of("niah_multikey_3") == "ruler"
    # RULER's tasks that are generated are still there.
    assert len(tasks_named(["ruler"])) == 11


def test_prompts_of_a_file(tmp_path: Path) -> None:
    write(tmp_path / "niah.jsonl", NEW, {**NEW, "input": 30 * TEXT})
    load = partial(load_tokenizer, str(LOOKUP), None)

    def suite(*lengths: int, samples: int | None = None) -> Suite:
        return Suite.of(["ruler_niah"], None, str(tmp_path), lengths=lengths, samples=samples)

    prepared = suite(64, 4096).prepare(load, lambda *a: None)
    assert list(prepared) == [QuestionId("ruler_niah", 4096, index) for index in (0, 1)]
    short = prepared[QuestionId("ruler_niah", 4096, 0)].prompt
    assert load().decode(short.token_ids).endswith(BEGINS)
    assert short.max_tokens == 128
    assert len(suite(64, 4096, samples=1).prepare(load, lambda *a: None)) == 1
    with pytest.raises(ToolError, match=r"ruler_niah: a prompt has \d+ tokens.*use --lengths"):
        suite(128).prepare(load, lambda *a: None)


def test_files_that_are_no_good(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="name it with --ruler"):
        tasks_named(["ruler_vt"])
    with pytest.raises(ToolError, match="no such folder"):
        tasks_named(["ruler_files"], None, tmp_path / "nowhere")
    with pytest.raises(ToolError, match=r"has neither TASK.jsonl nor TASK/validation.jsonl"):
        tasks_named(["ruler_files"], None, tmp_path)
    path = write(tmp_path / "vt.jsonl", OLD, {**OLD, "outputs": "red"})
    with pytest.raises(ToolError, match=r"ruler_cwe: .* has ruler_vt"):
        tasks_named(["ruler_cwe"], None, tmp_path)
    with pytest.raises(ToolError, match=r'vt.jsonl, line 2: "outputs" is "red"; it must be a list'):
        RulerFile("ruler_vt", path).samples()
    with pytest.raises(ToolError, match=r"x.jsonl holds no samples"):
        RulerFile("ruler_vt", write(tmp_path / "x.jsonl")).samples()
    write(tmp_path / "lookups.jsonl", OLD)
    with pytest.raises(ToolError, match=r"lookups.jsonl: the tasks of RULER are named niah"):
        tasks_named(["ruler_files"], None, tmp_path)
