"""Every test of this folder runs engines in its own process, on one thread."""

import pytest
import torch
from support import inside, options
from support.engine import keep_in_process


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_in_process(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def one_thread_on_cpu() -> None:
    # Threads on tiny matrices wait for each other where the cores are shared.
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def dense_ops_by_day(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By day tests run without the interpreted kernels, which take most of an engine's time.

    tests/ops compares them. Those marked `kernels` run them every day, and all do at night that do
    not ask for `dense_ops`.
    """
    runs_kernels = request.node.get_closest_marker("kernels") is not None
    if not (runs_kernels or options.nightly() or torch.cuda.is_available()):
        inside.use_dense_ops(monkeypatch)


@pytest.fixture
def dense_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and selects by the kernels' torch references: see ``inside.use_dense_ops``."""
    inside.use_dense_ops(monkeypatch)
