"""Commands that run in the tests' own process leave its log as it is."""

import pytest


@pytest.fixture(autouse=True)
def log_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
