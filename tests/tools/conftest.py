"""What every tool's tests need."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records are stored; nobody else's."""
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on tiny matrices mostly wait for each other, on a busy machine for seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
