"""Another release's Python over the installed CPU build: what of its wheel is taken."""

import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy import lay_over

FILES = {
    "vllm/__init__.py": "",
    "vllm/_C.abi3.so": "CUDA",
    "vllm/third_party/lib.so.1": "CUDA",
    "vllm/vllm-rs": "a server",
    "vllm/configs/E=8.json": "{}",
    "vllm-9.1.0.dist-info/METADATA": "Requires-Dist: a>=2\nRequires-Dist: b; extra=='x'\n",
    "vllm-9.1.0.dist-info/entry_points.txt": "[console_scripts]\nvllm = vllm.main:main\n",
    "vllm-9.1.0.dist-info/RECORD": "",
}


def test_a_wheel_is_unpacked_without_what_is_compiled(tmp_path: Path) -> None:
    wheel, into = tmp_path / "vllm-9.1.0.whl", tmp_path / "into"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    needed = lay_over.unpack(wheel, into, "9.1.0")
    assert [str(each) for each in needed] == ["a>=2", 'b; extra == "x"']
    found = {str(p.relative_to(into)) for p in into.rglob("*") if p.is_file()}
    info = "vllm-9.1.0+cpu.dist-info"
    assert found == {
        *("vllm/__init__.py", "vllm/configs/E=8.json"),
        *(f"{info}/METADATA", f"{info}/entry_points.txt"),
    }
    distribution = PathDistribution(into / info)
    assert (distribution.name, distribution.version) == ("vllm", "9.1.0+cpu")


def test_what_is_too_old_is_installed() -> None:
    needed = ["packaging>=1", "packaging>=10000", "no-such-thing", 'other; extra == "x"']
    found = lay_over.unmet([Requirement(line) for line in needed])
    assert found == ["packaging>=10000", "no-such-thing"]


def test_an_environment_that_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    folder = tmp_path / "env"
    assert lay_over.main(["9.1.0", str(folder)]) == 1
    assert f"{folder} is not made" in capsys.readouterr().err
    assert not (folder / "laid-over").exists(), "the next run begins anew"
