"""Every test of this folder runs engines in its own process, on one thread."""

import pytest
import torch
from support import inside
from support.engine import keep_in_process


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_in_process(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def one_thread_on_cpu() -> None:
    # Threads on tiny matrices wait for each other where the cores are shared.
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


@pytest.fixture
def dense_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and selects by the kernels' torch references: see ``inside.use_dense_ops``."""
    inside.use_dense_ops(monkeypatch)
