"""The soak's figures: what was done to the server, and what came of it."""

import datetime
import fcntl
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
    """Writes all figures to KVX_SOAK_OUTPUT, if that is set.

    Parts that run in processes of their own each add theirs to those of the others of this run.
    """
    path = os.environ.get("KVX_SOAK_OUTPUT")
    if not path or not _FIGURES:
        return
    with Path(path).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        about = _about(Path(path).name)
        before = json.loads(text) if text else {}
        same = about["run"] is not None and before.get("run") == about["run"]
        file.truncate(0)
        file.write(json.dumps((before if same else about) | _FIGURES, indent=1) + "\n")


def _about(name: str) -> dict[str, Any]:
    """What was run, on what. `run` is one for all processes of a run."""
    import torch
    import vllm

    requests = os.environ.get("KVX_SOAK_REQUESTS", "300")
    return {
        "run": os.environ.get("PYTEST_XDIST_TESTRUNUID"),
        "command": f"KVX_SOAK_REQUESTS={requests} KVX_SOAK_OUTPUT={name} "
        "bash tests/run.sh tests/soak",
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, no GPU",
        "versions": {
            "vllm-kvx": metadata.version("vllm-kvx"),
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def rss_mib(pid: int | str = "self") -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0
