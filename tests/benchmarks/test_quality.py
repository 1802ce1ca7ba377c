"""Runs of evaluate as one result file."""

import json
from pathlib import Path

import pytest

from benchmarks.answers.quality import read
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.store import SAME, Answer, QuestionId, Store
from vllm_kvx.tools.evaluate.summary import Summary


def run(directory: Path, dtype: str | None, *rows: str, right: float = 1.0) -> Path:
    facts = dict.fromkeys(SAME) | {"model": "m", "kv_cache_dtype": dtype, "command": "c"}
    store = Store(directory, facts)
    for row in rows:
        store.note_resolved(Row.parse(row), Row(row.partition(" ")[0]).over(dtype))
        store.add(
            [
                Answer(Row.parse(row), QuestionId("notes", 512, i), right, 500, 1, 1, "")
                for i in range(2)
            ]
        )
    return directory


def test_another_cache_stands_beside_the_first(tmp_path: Path) -> None:
    first = run(tmp_path / "a", None, "full", "fier-64")
    second = run(tmp_path / "b", "fp8", "full", "fier-64", "full (original)", right=0.5)
    answers, facts = read([first, second])
    summary = Summary(answers)
    assert list(map(str, summary.rows)) == [
        *("full", "fier-64", "full@fp8", "fier-64@fp8", "full@fp8 (original)"),
    ]
    cell = summary.cell(Row.parse("full@fp8"))
    assert cell is not None and cell.of_full is not None and cell.of_full.value == 0.5
    assert facts["resolved"]["fier-64"] == "fier-64"
    assert facts["resolved"]["full@fp8"] == "full@fp8"
    # What is stored stays as it was.
    assert json.loads((second / "run.json").read_text())["kv_cache_dtype"] == "fp8"
    with pytest.raises(SystemExit, match="name it first"):
        read([second, first])
    # All of these are the model's own.
    wide = run(tmp_path / "wide", "bfloat16", "snapkv")
    assert list(map(str, Summary(read([first, wide])[0]).rows)) == ["full", "fier-64", "snapkv"]
    # A run that was cut off before its first answer is not there.
    none = run(tmp_path / "none", None)
    assert len(read([none, first])[0]) == len(read([first])[0])
    with pytest.raises(SystemExit, match="there are no answers"):
        read([none])
    # A third run over the same cache adds to what is there.
    third = run(tmp_path / "c", "fp8", "snapkv")
    assert Row("snapkv", "fp8") in Summary(read([first, second, third])[0]).rows
