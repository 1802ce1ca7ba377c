"""`vllm-kvx recommend` from its command line to what a server serves, on a real engine."""

import json
from pathlib import Path

import pytest
from support.engine import keep_in_process
from support.models import LOOKUP

from vllm_kvx.cli import main
from vllm_kvx.policy.auto import Auto
from vllm_kvx.records import recommendation as records
from vllm_kvx.records.model_key import ModelIdentity
from vllm_kvx.server.auto_policy import choose
from vllm_kvx.tools.checkpoint.loading import load_config

SMALL = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 512}
KEEPS, LOSES = "snapkv:kv_rate=0.9,kv_floor=0", "streamingllm:sinks=1,recent=9"


def recommend(results: Path, *more: str) -> int:
    fixed = ["recommend", str(LOOKUP), "--keep", "0.5", "--tasks", "notes_3", "--input", "320"]
    fixed += ["--output", "16", "--samples", "8", "--results", str(results), "--policies"]
    return main([*fixed, KEEPS, LOSES, "--engine-args", json.dumps(SMALL), *more])


@pytest.mark.nightly
def test_what_keeps_the_answers_is_saved_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    keep_in_process(monkeypatch)
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))
    assert recommend(tmp_path / "out") == 0
    cleanup_dist_env_and_memory()
    out, err = capsys.readouterr()
    assert "round 1 of 1: " in err and f"{LOSES}: kept " in err
    assert f"--kv-policy {KEEPS}" in out and f"--kv-policy {LOSES}" not in out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["chosen"] == KEEPS and not report["out_of_time"]
    verdicts = {each["policy"]: each["verdict"] for each in report["policies"]}
    # Eight answers show that one keeps half, and of the other at least not that.
    assert verdicts[KEEPS] == "kept" and verdicts[LOSES] in ("lost", "undecided")
    identity = ModelIdentity(str(LOOKUP), load_config(str(LOOKUP)).to_dict())
    record = records.load(identity.key)
    assert record is not None and record.workload["input"] == 320
    chosen = choose(Auto(0.5), identity, lambda name: None)
    assert (chosen.policy, chosen.source) == (KEEPS, "measured")
    assert recommend(tmp_path / "new", "--time-limit", "0.00001", "--no-save") == 2
    assert "--time-limit" in capsys.readouterr().err
