"""Shared set-up: on a machine without a GPU every test runs vLLM's Model Runner V2 on CPU."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import options

if not torch.cuda.is_available():
    os.environ.setdefault("KVX_CPU", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


# Files of few tests that take minutes. They come first: last, one process would wait for the other.
LONG = (
    *("soak/test_soak_server.py", "soak/test_soak_engine.py", "engine/test_tensor_parallel.py"),
    *("server/serve/test_serve.py", "server/serve/test_serve_status.py"),
    "tools/batch/test_batch_command.py",
    *("engine/test_architectures.py", "simulation/test_simulation.py"),
    *("tools/evaluate/test_command.py", "engine/test_prefix_sharing.py"),
)


# Files of one folder that share what takes long to start.
TOGETHER = "tests/server/serve/"


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add(parser)


def pytest_configure(config: pytest.Config) -> None:
    options.read(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not options.nightly():
        skip = pytest.mark.skip(reason="nightly: pass --nightly")
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(skip)
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(here).as_posix()
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As ``--dist loadfile``, but that the files of `TOGETHER` run in one process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_runtest_setup() -> None:
    """Spares vLLM a process for every class of model that it has not seen on this machine.

    It looks at the class there lest a GPU is taken, and imports itself anew: seconds each.
    """
    registry: Any = sys.modules.get("vllm.model_executor.models.registry")
    if registry is not None and not torch.cuda.is_available():
        registry._run_in_subprocess = _here


def _here(look: Callable[[], Any]) -> Any:
    return look()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Two threads on tiny matrices mostly wait for each other, on a busy machine for seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds tiny models, each once per session."""
    from support.models import TinyModels

    return TinyModels(tmp_path_factory.mktemp)
