"""Whether the script that makes an engine in Python can be run again by the engine's processes.

On CPU vLLM spawns them, and a spawned process first runs the script of the one that started it. A
script that makes the engine at its top level would make another there, which Python refuses with a
traceback that says nothing of vLLM.
"""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvx.server.start_refusal import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# What a script has that looks whether it is run again.
_GUARDS = ("__name__", "parent_process", "current_process")


def runs_again_unguarded() -> bool:
    """Whether a spawned process would make this engine once more, as far as is certain."""
    if multiprocessing.parent_process() is not None:
        return False
    main = sys.modules["__main__"]
    # As ``multiprocessing.spawn`` finds what to run; of `python -m PACKAGE` it runs nothing.
    path = getattr(main, "__file__", None)
    name = getattr(getattr(main, "__spec__", None), "name", "")
    if path is None or name.rpartition(".")[2] == "__main__" or Path(path).stem == "ipython":
        return False
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return not any(guard in source for guard in _GUARDS)


def _applies(vllm_config: "VllmConfig") -> bool:
    import vllm.envs
    from vllm.platforms import current_platform

    spawns = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "spawn"
    return (
        current_platform.is_cpu()
        and spawns
        and vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING
        and runs_again_unguarded()
    )


# For engines that are made in Python.
OF_SCRIPT: tuple[Refusal, ...] = (
    Refusal(
        _applies,
        "on CPU vLLM's processes run the script again that starts them, and this one would start "
        'the engine there, too: put what it does below `if __name__ == "__main__":`',
    ),
)
