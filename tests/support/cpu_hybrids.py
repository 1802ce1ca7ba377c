"""What vLLM's CPU build lacks of hybrids, completed for tests: one call for all of it."""

import pytest

from support.cpu_delta_rule import run_delta_rule_in_float32
from support.cpu_rotary import complete_cpu_rotary
from support.cpu_router import complete_cpu_router
from support.cpu_scan import complete_cpu_scan
from support.engine import forget_ranks
from support.transformers_backend import keep_transformers_classes


def complete_cpu_hybrids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test's end, vLLM's CPU build runs every hybrid in float32, as GPUs do.

    What an engine that failed to start has left in this process is ended.
    """
    complete_cpu_rotary(monkeypatch)
    complete_cpu_router(monkeypatch)
    complete_cpu_scan(monkeypatch)
    run_delta_rule_in_float32(monkeypatch)
    keep_transformers_classes(monkeypatch)
    forget_ranks()
