"""Where GPU tests take NCCL from."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from support.gpu import with_nccl


def test_nccl_beside_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec("nvidia.nccl", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", {"nvidia.nccl": spec}.__getitem__)
    assert with_nccl({"A": "b"}) == {"A": "b"}
    library = tmp_path / "lib" / "libnccl.so.2"
    library.parent.mkdir()
    library.touch()
    assert with_nccl({"A": "b"}) == {"A": "b", "VLLM_NCCL_SO_PATH": str(library)}
    given = {"VLLM_NCCL_SO_PATH": "own", "A": "b"}
    assert with_nccl(given) == given


def test_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    for found in (missing, lambda _: None):
        monkeypatch.setattr(importlib.util, "find_spec", found)
        assert with_nccl({"A": "b"}) == {"A": "b"}
