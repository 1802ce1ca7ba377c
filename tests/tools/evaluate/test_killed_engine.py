"""An engine whose process is killed ends the answers that wait for it, with an error."""

import os
import signal
from collections.abc import Sequence

import pytest
from support.models import LOOKUP

from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.evaluate.engine import EngineFailed, OwnEngine, Prompt, own_engine
from vllm_kvx.tools.evaluate.rows import Row


class Kills:
    """Kills the engine's process as soon as it has answered anything."""

    def __init__(self, engine: OwnEngine) -> None:
        manager = engine.llm.llm_engine.engine_core.resources.engine_manager
        (self.process,) = manager.processes

    def begin(self, row: Row, count: int) -> None:
        pass

    def step(self, read: Sequence[int], written: int) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def finish(self, prompt: Prompt, tokens: int) -> None:
        pass


def test_answers_end_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    row = Row("full")
    policies: dict[Row, KVPolicy] = {row: parse_policy("full")}
    options = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
    failed = pytest.raises(EngineFailed, match="the engine failed under full: EngineCore")
    with own_engine(str(LOOKUP), policies, options) as engine, failed:
        engine.answers(row, [Prompt(range(5, 40), 900)], Kills(engine))
