"""A policy whose prompts the engine refuses costs the others nothing."""

import json
from pathlib import Path

import pytest
from support.engine import keep_in_process
from support.models import LOOKUP
from transformers import AutoTokenizer

from vllm_kvx.cli import main
from vllm_kvx.tools.evaluate.questions import Suite

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
