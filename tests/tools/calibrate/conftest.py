"""What every tool's tests need."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.configs import vllm_config


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records are stored; nobody else's."""
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module", autouse=True)
def in_one_thread(one_thread: None) -> None:
    """All tests of this folder run so."""


@pytest.fixture
def make_config() -> Callable[..., Any]:
    """Creates a VllmConfig as a server would: make_config(policy, **engine arguments)."""

    def make(policy: Any = None, *, model: str, **kwargs: Any) -> Any:
        return vllm_config(model, policy, **kwargs)

    return make


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What `vllm.kvx` and its children log; vLLM's logger hands nothing on to pytest's."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("vllm.kvx"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)
