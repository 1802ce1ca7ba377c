"""What every GPU test needs: the plugin, engines in this process, float32 that is float32."""

import os
from importlib.metadata import entry_points

import pytest
from support.engine import keep_in_process

# Triton multiplies float32 in TF32 unless told otherwise, three digits short of exact.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
# A test that asks for the number of GPUs may not fork ranks any more.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


@pytest.fixture(scope="session", autouse=True)
def plugin_is_installed() -> None:
    """Without its entry point vLLM would start stock engines."""
    found = [entry.value for entry in entry_points(group="vllm.general_plugins")]
    assert "vllm_kvx.plugin:register" in found, "install vllm-kvx first: pip install --no-deps -e ."


@pytest.fixture(autouse=True)
def engines_are_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_in_process(monkeypatch)
