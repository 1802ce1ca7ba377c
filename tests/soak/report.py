"""The soak's figures: what was done to the server, and what came of it."""

import datetime
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

_FIGURES: dict[str, dict[str, Any]] = {}


def add(part: str, **figures: Any) -> None:
    """Figures of one part; written once the session ends, see `write`."""
    _FIGURES[part] = figures


def write() -> None:
    """Writes all figures to KVX_SOAK_OUTPUT, if that is set."""
    path = os.environ.get("KVX_SOAK_OUTPUT")
    if not path or not _FIGURES:
        return
    import torch
    import vllm

    requests = os.environ.get("KVX_SOAK_REQUESTS", "60")
    found = {
        "command": f"KVX_SOAK_REQUESTS={requests} KVX_SOAK_OUTPUT={Path(path).name} "
        "bash tests/run.sh tests/soak",
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, no GPU",
        "versions": {
            "vllm-kvx": metadata.version("vllm-kvx"),
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **_FIGURES,
    }
    Path(path).write_text(json.dumps(found, indent=1) + "\n")


def rss_mib(pid: int | str = "self") -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0
