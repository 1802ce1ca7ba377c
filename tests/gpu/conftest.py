"""What every GPU test needs."""

from importlib.metadata import entry_points

import pytest
from world.engine import keep_in_process


@pytest.fixture(scope="session", autouse=True)
def plugin_is_installed() -> None:
    """Without its entry point vLLM would start stock engines."""
    found = [entry.value for entry in entry_points(group="vllm.general_plugins")]
    assert "vllm_kvx.plugin:register" in found, "install vllm-kvx first: pip install --no-deps -e ."


@pytest.fixture(autouse=True)
def engines_are_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_in_process(monkeypatch)
