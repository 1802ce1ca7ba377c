"""What happens at start, in tools, and where policies are named."""

from collections.abc import Callable
from typing import Any

import pytest


def slice_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The dense decoder runs so many rows at once."""
    from vllm_kvx.tools.checkpoint import dense_decoder

    monkeypatch.setattr(dense_decoder, "_SLICE", rows)


def run_in_full(request: Any, why: str) -> None:
    """Has the scheduler run a request under `full`, which it says in the log."""
    from vllm_kvx.cache import scheduler

    scheduler._run_in_full(request, why)


def naming(settings: Any, tell: Callable[[str], None], original: Callable[..., Any]) -> Any:
    """What takes the place of ``InputProcessor.process_inputs``, of a server of `settings`."""
    from types import SimpleNamespace

    from vllm_kvx.server.outputs import _naming

    processor = SimpleNamespace(_kvx_settings=settings)
    wrapped = _naming(tell, original)
    return lambda *args, **kwargs: wrapped(processor, *args, **kwargs)
