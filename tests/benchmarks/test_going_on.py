"""Benchmarks that were cut off go on from their files: engines are stood in for."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.files import ROOT
from benchmarks.engine import own_drafts, ranks


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would set variables for the tests that come after these, too."""
    for module in (own_drafts, ranks):
        monkeypatch.setattr(module, "prepare_environment", lambda: None)


def test_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = tmp_path / "out.json", list[str]()
    answers = {"stock": [[1, 2, 3], [4, 5, 6]], "fier-64": [[1, 2, 3], [4, 9, 6]]}
    fails = {"fier-64"}

    def run(args: Namespace, name: str, *_: Any) -> tuple[dict[str, Any], own_drafts.Answers]:
        asked.append(name)
        if name in fails:
            raise RuntimeError("no memory")
        return {"2x600": {"tokens_per_s": 1.0}}, {"2x600": answers[name]}

    monkeypatch.setattr(own_drafts, "run", run)
    argv = ["--model", str(ROOT / "tests/checkpoints/lookup-8l"), "--batches", "2x600"]
    argv += ["--servers", "stock", "fier-64", "--out", str(out)]
    assert own_drafts.main([*argv, "--time-limit", "-1"]) == 1 and not asked
    assert own_drafts.main(argv) == 1 and asked == ["stock", "fier-64"]
    assert json.loads(out.read_text())["servers"]["fier-64"] == {"error": "no memory"}
    fails.clear()
    assert own_drafts.main(argv) == 0 and asked[2:] == ["fier-64"]
    content = json.loads(out.read_text())
    # The answers that others are compared with are those of the first run.
    rows = {name: entry["2x600"] for name, entry in content["servers"].items()}
    assert [rows[name]["same_answers"] for name in ("stock", "fier-64")] == [2, 1]
    assert rows["fier-64"]["agree_for"] == [3, 1] and content["answers_of"] == "stock"
    assert own_drafts.main(argv) == 0 and len(asked) == 3
    with pytest.raises(SystemExit, match="was made with other settings"):
        own_drafts.main([*argv, "--tokens", "8"])


def test_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = tmp_path / "out.json", list[str]()
    fails = {"fier-64"}

    def run_alone(args: Namespace, server: str, count: int) -> dict[str, Any]:
        asked.append(f"{server} {count}")
        if server in fails:
            raise RuntimeError("no memory")
        row = {"step_ms": 2.0 if server == "stock" else 1.0, "ranks": [{"device_busy_ms": 1.0}]}
        cases = {text.partition("@")[0] if server == "stock" else text for text in args.cases}
        return {"start_s": 1.0, "cases": {text: row | {"waits": None} for text in cases}}

    monkeypatch.setattr(ranks, "run_alone", run_alone)
    argv = ["--model", "tiny", "--ranks", "1", "--servers", "stock", "fier-64", "--steps", "4"]
    argv += ["--out", str(out), "--cases", "1x64", "1x64@snapkv"]
    assert ranks.main([*argv, "--time-limit", "-1"]) == 1 and not asked
    assert ranks.main(argv) == 1 and asked == ["stock 1", "fier-64 1"]
    fails.clear()
    assert ranks.main(argv) == 0 and asked[2:] == ["fier-64 1"]
    content = json.loads(out.read_text())
    assert {row["gain"] for row in content["servers"]["fier-64"]["1"]["cases"].values()} == {2.0}
    assert ranks.main(argv) == 0 and len(asked) == 3
    # A case more is measured, and those that are there stay.
    assert ranks.main([*argv[:-2], "2x64"]) == 0 and len(asked) == 5
    cases = json.loads(out.read_text())["servers"]["fier-64"]["1"]["cases"]
    assert set(cases) == {"1x64", "1x64@snapkv", "2x64"}
    with pytest.raises(SystemExit, match="was made with other settings"):
        ranks.main([*argv, "--layout", "snapkv"])
