"""What every tool's tests need."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records are stored; nobody else's."""
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module", autouse=True)
def in_one_thread(one_thread: None) -> None:
    """All tests of this folder run so."""
