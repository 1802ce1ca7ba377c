"""The build of the CUDA operators where it cannot begin; nothing is compiled here."""

import subprocess
from pathlib import Path

import pytest
from world import inside

from vllm_kvx.errors import ToolError
from vllm_kvx.ops import build as build_ops

MISSING = "nvcc is missing: install the CUDA toolkit .* set CUDA_HOME or PATH; .* runs without"


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither CUDA_HOME nor PATH has one, and whatever would be run is an error."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PATH", str(tmp_path))

    def refuse(command: list[str], **_: object) -> None:
        pytest.fail(f"ran {command}")

    monkeypatch.setattr(subprocess, "run", refuse)


def test_no_compiler(tmp_path: Path) -> None:
    output = tmp_path / "ops.so"
    with pytest.raises(ToolError, match=MISSING):
        build_ops.build(output=output)
    assert not output.exists()


def test_the_command_without_compiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_ops.main(["--output", str(tmp_path / "ops.so")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("build_ops: error: nvcc is missing") and not said.out


def test_where_the_compiler_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_path, in_home = tmp_path / "nvcc", tmp_path / "cuda" / "bin" / "nvcc"
    in_home.parent.mkdir(parents=True)
    for file in (in_path, in_home):
        file.touch(mode=0o755)
    assert inside.find_nvcc() == str(in_home)
    monkeypatch.delenv("CUDA_HOME")
    assert inside.find_nvcc() == str(in_path)


def test_architectures_are_nvccs_names(capsys: pytest.CaptureFixture[str]) -> None:
    spellings = {"90a": "90a", "9.0a": "90a", "sm_80": "80", "12.0": "120", "100f": "100f"}
    assert {text: build_ops.architecture(text) for text in spellings} == spellings
    for wrong in ("", "hopper", "9", "90b", "80;90a"):
        with pytest.raises(SystemExit):
            build_ops.main(["--arch", wrong])
        assert "must be a compute capability such as 90a" in capsys.readouterr().err


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=f"no CUDA sources in {tmp_path}: install vllm-kvx again"):
        build_ops.build(sources=tmp_path, nvcc="nvcc", output=tmp_path / "ops.so")
