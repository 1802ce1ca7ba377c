"""The build of the CUDA operators: where it cannot begin, and what it says; nothing is compiled."""

import re
import subprocess
from pathlib import Path

import pytest
from support import inside
from support.nvcc import make_nvcc

from vllm_kvx.errors import ToolError
from vllm_kvx.ops import build as build_ops
from vllm_kvx.ops import library

RUN = subprocess.run

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


# A compiler that is none, or none for us.


def refusal(said: pytest.CaptureFixture[str], *options: object) -> str:
    """The one line that the command ends with."""
    assert build_ops.main([*map(str, options)]) == 2
    captured = said.readouterr()
    (line,) = captured.err.splitlines()
    assert not captured.out and line.startswith("build_ops: error: ")
    return line.removeprefix("build_ops: error: ")


def test_a_compiler_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ("--output", tmp_path / "ops.so")

    def says(nvcc: object) -> str:
        return refusal(capsys, *output, "--nvcc", nvcc)

    assert says("/nope") == "--nvcc /nope is not there: name a compiler, or set CUDA_HOME"
    assert says("nvcc").startswith("--nvcc nvcc is not in PATH: name the compiler's path")
    assert says("").startswith("--nvcc  is a folder"), "an empty variable"
    (tmp_path / "nvcc.txt").write_text("#!/bin/sh\n")
    assert says(tmp_path / "nvcc.txt") == f"--nvcc {tmp_path}/nvcc.txt is not executable"
    assert says(tmp_path) == f"--nvcc {tmp_path} is a folder: name the compiler in it"
    nvcc = make_nvcc(tmp_path / "cuda")
    assert says(nvcc.parents[1]).endswith(f"is a folder: name the compiler in it, --nvcc {nvcc}")
    assert says(nvcc.parent).endswith(f"name the compiler in it, --nvcc {nvcc}")


def test_a_compiler_that_will_not_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", RUN)
    output = ("--output", tmp_path / "ops.so")
    old = make_nvcc(tmp_path / "old", version="12.4")
    assert refusal(capsys, *output, "--nvcc", old) == (
        f"{old} is of CUDA 12.4, and the operators need 12.8 or later: install that, or name "
        "another by --nvcc"
    )
    fails = make_nvcc(tmp_path / "fails", code=3)
    said = refusal(capsys, *output, "--nvcc", fails)
    assert said.startswith(f"{fails} --version fails: Cuda compilation tools")
    broken = tmp_path / "nvcc"
    broken.write_text("#!/nowhere/python\n")
    broken.chmod(0o755)
    # The same for one that is found, not named.
    monkeypatch.setenv("CUDA_HOME", "")
    for options in (("--nvcc", broken), ()):
        assert refusal(capsys, *output, *options).startswith(f"{broken} cannot be run: ")


def test_an_output_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nvcc = ("--nvcc", make_nvcc(tmp_path / "cuda"))
    said = refusal(capsys, *nvcc, "--output", tmp_path)
    assert said == f"--output {tmp_path} is a folder: name the file to write"
    said = refusal(capsys, *nvcc, "--output", "/proc/nothing/ops.so")
    assert said.startswith("--output /proc/nothing/ops.so cannot be written")
    for wrong in ("0", "-1"):
        with pytest.raises(SystemExit):
            build_ops.main(["--jobs", wrong])
        assert "must be at least 1" in capsys.readouterr().err


# How far it is.


@pytest.mark.parametrize("jobs", [1, 2, 64])
def test_what_is_compiled_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], jobs: int
) -> None:
    monkeypatch.setattr(subprocess, "run", RUN)
    nvcc, output = make_nvcc(tmp_path / "cuda"), tmp_path / "ops.so"
    options = ["--nvcc", str(nvcc), "--arch", "80", "--jobs", str(jobs), "--output", str(output)]
    assert build_ops.main(options) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{output}\n"
    first, *lines, last = captured.err.splitlines()
    names = [path.name for path in library.SOURCES.iterdir() if path.suffix in (".cu", ".cpp")]
    names = sorted([*names, "record.cpp"])
    count = len(names)
    assert first == (
        f"Compiling {count} sources for 80, {min(jobs, count)} at a time, with {nvcc} of CUDA "
        "13.0: this takes minutes"
    )
    assert re.fullmatch(r"Linking, \d+ s after the start", last)
    done = [int(re.match(rf"\[(\d+)/{count}\] ", line)[1]) for line in lines]  # type: ignore[index]
    assert done == sorted(done) and (done[0], done[-1]) == (0, count)
    took = [name for line in lines for name in re.findall(r"(\S+) took \d+ s", line)]
    assert sorted(took) == names
    for line in lines[:-1]:
        now = line.partition("compiling ")[2].split(", ")
        assert 1 <= len(now) <= jobs and set(now) <= set(names)


def test_a_source_that_does_not_compile_ends_the_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once: what has not begun is not compiled, and nothing is written."""
    monkeypatch.setattr(subprocess, "run", RUN)
    sources, output = tmp_path / "csrc", tmp_path / "ops.so"
    sources.mkdir()
    for name in "abcdef":
        (sources / f"{name}.cu").write_text("#error no\n" if name == "b" else "")
    nvcc = str(make_nvcc(tmp_path / "cuda"))
    with pytest.raises(ToolError, match=r"b\.cu\(1\): error"):
        build_ops.build(["80"], sources=sources, output=output, nvcc=nvcc, jobs=1)
    said = capsys.readouterr().err
    assert "compiling b.cu" in said and "c.cu" not in said and not output.exists()
