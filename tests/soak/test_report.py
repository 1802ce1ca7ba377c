"""The soak's figures file: one command's, with the parts of all its processes."""

import json
from pathlib import Path

import pytest

from benchmarks.common.about import KEYS
from soak.report import Report, command_of


def said(path: Path, run: str | None, parts: dict[str, int], *failed: str) -> dict:
    """What is in the file after a process has written its parts."""
    report = Report()
    report.parts = {part: {"requests": count} for part, count in parts.items()}
    report.failed = list(failed)
    report.write(path, run, "bash tests/run.sh tests/soak")
    return json.loads(path.read_text())


def test_processes_of_a_run_add_up(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    said(path, "a", {"engine": 300}, "test_x")
    found = said(path, "a", {"server": 30, "engine_kill": 1})
    assert [found[part]["requests"] for part in ("engine", "server", "engine_kill")] == [300, 30, 1]
    assert found["failed"] == ["test_x"]
    assert found["about"]["command"] == "bash tests/run.sh tests/soak"
    assert set(KEYS) == set(found["about"])
    assert {"vllm", "vllm-kvx", "torch", "python"} == set(found["about"]["versions"])


@pytest.mark.parametrize("run", ["b", None])
def test_another_run_begins_anew(tmp_path: Path, run: str | None) -> None:
    """Also where no process has a name: two such files are two commands'."""
    path = tmp_path / "soak.json"
    said(path, None if run is None else "a", {"engine": 1000}, "test_x")
    found = said(path, run, {"server": 30})
    assert "engine" not in found and found["failed"] == []


def test_the_command_is_the_one_that_ran() -> None:
    given = ["--requests", "1000", "--soak-output", "/somewhere/else/soak.json"]
    said = "--requests 1000 --soak-output soak.json"
    called = [
        "/somewhere/pytest/__main__.py",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        *given,
        "tests/soak",
    ]
    assert command_of(called) == f"bash tests/run.sh {said} tests/soak"
    alone = ["pytest", "-q", "--soak-output=/else/a.json", "tests/soak/test_x.py", "-k", "a or b"]
    assert command_of(alone) == (
        "python -m pytest -q --soak-output=a.json tests/soak/test_x.py -k 'a or b'"
    )
