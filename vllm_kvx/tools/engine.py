"""What tools that start an engine share."""

import os
import time
from threading import Thread
from typing import Any

from vllm_kvx.compat.cpu_mode import CPU_MODE_VARIABLE


def prepare_environment() -> None:
    """Sets what vLLM reads before it is imported: on CPU the runner that GPUs use, and less log."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not on_cpu():
        # To ask torch for GPUs, as these tools do, spoils CUDA for processes that are forked.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    else:
        os.environ.setdefault(CPU_MODE_VARIABLE, "1")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")


def on_cpu() -> bool:
    """Whether this machine has no GPU that torch can use."""
    import torch

    return not torch.cuda.is_available()


def wake_if_dead(llm: Any) -> None:
    """Has a call that waits for `llm`'s outputs raise EngineDeadError once its process is gone.

    vLLM's client notices that a process was killed, and fails later calls; one that waits for
    outputs then would wait for ever. An engine in this process needs nothing.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    client = llm.llm_engine.engine_core
    outputs = getattr(client, "outputs_queue", None)
    if outputs is None:
        return
    resources = client.resources

    def wake() -> None:
        # The client sets it when it is closed, too; nobody waits then.
        while not resources.engine_dead:
            time.sleep(0.5)
        outputs.put_nowait(EngineDeadError())

    Thread(target=wake, daemon=True, name="wake_if_dead").start()


def last_line(error: BaseException) -> str:
    """The last line of an error's message, which names the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
