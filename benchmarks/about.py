"""The head of a result file: what was run, when, at which commit, on what."""

import datetime
import os
import platform
from typing import Any

from benchmarks.compare import git_commit, gpu


def about(command: str, commit: str | None = None) -> dict[str, Any]:
    """Command, date, commit, machine and versions; commit: where it is not this checkout's."""
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "commit": commit or git_commit(),
        "machine": gpu() or f"{platform.machine()}, {os.cpu_count()} CPU cores, no GPU",
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of what runs here. vLLM's own word counts: its package may be one with another's Python."""
    import torch
    import vllm

    from vllm_kvx import __version__

    return {
        "vllm-kvx": __version__,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
