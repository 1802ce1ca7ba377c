"""What a start in Python on a CPU is told: all that has to change, at once."""

import multiprocessing
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.configs import engine_args
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from vllm_kvx.server.script_check import OF_SCRIPT, runs_again_unguarded

GUARDED = 'if __name__ == "__main__":\n    llm = LLM("m")\n'
UNGUARDED = 'llm = LLM("m")\n'

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU needs")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Has a file with this source be the script that runs."""

    def run(source: str, name: str = "script.py", module: str | None = None) -> None:
        path = tmp_path / name
        path.write_text(source)
        main = ModuleType("__main__")
        main.__file__ = str(path)
        main.__spec__ = None if module is None else ModuleSpec(module, None)
        monkeypatch.setitem(sys.modules, "__main__", main)

    return run


def test_scripts_that_spawned_processes_run_again(script, monkeypatch) -> None:
    script(UNGUARDED)
    assert runs_again_unguarded()
    script(UNGUARDED, module="package.script")
    assert runs_again_unguarded()
    script(GUARDED)
    assert not runs_again_unguarded()
    script("import multiprocessing as mp\nif mp.parent_process() is None:\n    LLM()\n")
    assert not runs_again_unguarded()
    # These are not run again: a package's own, and IPython's.
    script(UNGUARDED, module="package.__main__")
    assert not runs_again_unguarded()
    script(UNGUARDED, name="ipython.py")
    assert not runs_again_unguarded()
    # Nor is what somebody types, and what is started already is not refused.
    script(UNGUARDED)
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert not runs_again_unguarded()
    script(UNGUARDED)
    (Path(sys.modules["__main__"].__file__ or "")).unlink()
    assert not runs_again_unguarded()
    script(UNGUARDED)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert not runs_again_unguarded()


def start(llama: str) -> None:
    """Makes a configuration as `LLM` does."""
    policy = {"kv_policy": "snapkv:kv_rate=0.2"}
    given = engine_args(llama, dtype="float32", additional_config=policy)
    EngineArgs(**given).create_engine_config(usage_context=UsageContext.LLM_CLASS)


@on_cpu
def test_a_script_without_a_guard_is_refused(llama: str, script, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    script(GUARDED)
    start(llama)
    script(UNGUARDED)
    with pytest.raises(ValueError, match='put what it does below `if __name__ == "__main__":`'):
        start(llama)
    # An engine in this process starts none.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    start(llama)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert not any(row.applies(None) for row in OF_SCRIPT)  # type: ignore[arg-type]


SCRIPT = """
from vllm import LLM
LLM({model!r}, additional_config={{"kv_policy": {policy!r}}}, skip_tokenizer_init=True,
    dtype="bfloat16", load_format="dummy")
"""


@on_cpu
@pytest.mark.parametrize("policy", ["snapkv:kv_rate=0.2", "fastkv:kv_rate=0.4"])
def test_all_that_a_cpu_needs_is_told_at_once(policy: str, llama: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(model=llama, policy=policy))
    unset = ("KVX_CPU", "TRITON_INTERPRET", "VLLM_ENABLE_V1_MULTIPROCESSING")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env=environment
    )
    refusal = done.stderr.partition("cannot run in this configuration:\n")[2]
    told = [line for line in refusal.splitlines() if line.startswith("  - ")]
    for wanted in ("set KVX_CPU=1", "enforce_eager=True", "dtype=float32", "if __name__ =="):
        assert sum(wanted in line for line in told) == 1, done.stderr[-2000:]
    assert len(told) == 4
