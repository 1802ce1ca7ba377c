"""A policy whose prompts the engine refuses costs the others nothing, and an engine its own."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from support.engine import keep_in_process
from support.models import LOOKUP
from transformers import AutoTokenizer

from vllm_kvx.cli import main
from vllm_kvx.tools.evaluate import command
from vllm_kvx.tools.evaluate.engine import Answered, EngineFailed, Prompt
from vllm_kvx.tools.evaluate.questions import Suite
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.shares import Shares

SMALL = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 512}
SNAPKV = "snapkv:kv_rate=0.1,kv_floor=0"
AHEAD = f"{SNAPKV},lookahead=32"


def evaluate(output: Path, options: dict[str, int]) -> int:
    fixed = ["evaluate", str(LOOKUP), "--tasks", "notes_3", "--lengths", "320", "--samples", "1"]
    fixed += ["--output", str(output), "--no-plot", "--policies", AHEAD, SNAPKV]
    return main([*fixed, "--engine-args", json.dumps(SMALL | options)])


def test_others_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    keep_in_process(monkeypatch)
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))
    suite = Suite.of(["notes_3"], None, lengths=(320,), samples=1)
    prepared = suite.prepare(lambda: AutoTokenizer.from_pretrained(LOOKUP), lambda *_: None)
    room = suite.context(prepared)
    # These answers are shorter than what is drafted.
    assert suite.longest_answer < 32 and suite.context(prepared, 32) == 320 + 32

    assert evaluate(tmp_path, {"max_model_len": room}) == 2
    cleanup_dist_env_and_memory()
    err = capsys.readouterr().err
    assert f"does not answer under {AHEAD}" in err and "leaves room for" in err
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert {json.loads(line)["question"]["policy"] for line in lines} == {"full", SNAPKV}
    # The same command, without such a limit, asks what is missing.
    assert evaluate(tmp_path, {}) == 0
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 3


class Fails:
    """An engine whose answers are all wrong, and which fails under one row."""

    asked: ClassVar[list[str]] = []

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def resolved(self, row: Row) -> Row:
        return row

    def shares(self, row: Row, prompt_len: int, generated: int) -> Shares:
        return Shares(1.0, 0.5, 1.0)

    def answers(self, row: Row, prompts: Sequence[Prompt], *_: object) -> list[Answered]:
        self.asked.append(str(row))
        if str(row) == "fier-64":
            raise EngineFailed(f"the engine failed under {row}: no memory")
        return [Answered("", 0.0, 4) for _ in prompts]


def test_another_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def own_engine(model: str, rows: Iterable[Row], options: object) -> Iterator[Fails]:
        yield Fails(rows)

    monkeypatch.setattr(command, "own_engine", own_engine)
    policies = ["fier-32", "fier-64", "fier-128", "fier-64:reduction=softmax"]
    fixed = ["evaluate", str(LOOKUP), "--tasks", "notes_3", "--lengths", "320", "--samples", "1"]
    fixed += ["--output", str(tmp_path), "--no-plot", "--keep-going", "--policies", *policies]
    assert main(fixed) == 2
    # What shares the engine that failed is passed over, and asked the next time.
    assert Fails.asked == ["full", "fier-32", "fier-64", "fier-64:reduction=softmax"]
    out, err = capsys.readouterr()
    assert "the engine failed under fier-64: no memory. The report is of what" in err
    assert "fier-64:reduction=softmax" in out and "fier-128" not in out
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 3
