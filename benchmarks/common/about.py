"""The head of a result file: what was run, when, at which commit, on what, with which versions."""

import datetime
import importlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.files import ROOT

# Of a head, in this order. All but `what` may be null, which is: not known.
KEYS = ("what", "command", "date", "commit", "device", "versions")
_PACKAGES = ("vllm-kvx", "vllm", "torch")


def about(
    what: str,
    command: str | Sequence[str] | None,
    commit: str | None = None,
    packages: Sequence[str] = (),
    **known: Any,
) -> dict[str, Any]:
    """The head of a file.

    Args:
        what: the file's content in one sentence.
        command: the one that measured, or several.
        commit: of what was measured, where that is not this checkout.
        packages: whose versions count, beside vLLM's, torch's and ours.
        known: date, device and versions, where another machine measured.
    """
    head = {
        "what": what,
        "command": command if command is None or isinstance(command, str) else list(command),
        "date": known.get("date") if known else now(),
        "commit": commit or known.get("commit", None if known else git_commit()),
        "device": known.get("device") or (None if known else device()),
        "versions": known.get("versions") or (None if known else versions(*packages)),
    }
    assert tuple(head) == KEYS
    return head


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def device() -> str:
    """The first GPU with its driver, or this machine's processor."""
    return gpu() or f"{platform.machine()}, {os.cpu_count()} CPU cores, no GPU"


def versions(*packages: str) -> dict[str, str]:
    """Versions of what runs here, Python included; packages that are not there are left out."""
    found = {}
    for name in (*_PACKAGES, *packages):
        try:
            # vLLM's own word counts: its package may be one with another's Python.
            found[name] = str(importlib.import_module(name.replace("-", "_")).__version__)
        except (ImportError, AttributeError):
            continue
    return {**found, "python": platform.python_version()}


def command_line(module: str, argv: Sequence[str]) -> str:
    """The command for a result; of files elsewhere on this machine it has the names."""
    shown = [Path(text).name if Path(text).is_absolute() else text for text in argv]
    return shlex.join(["python", "-m", module, *shown])


def git_commit() -> str | None:
    """The checkout's commit, marked if files differ from it; None outside a checkout."""
    run = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True)
        dirty = subprocess.run([*run, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def gpu() -> str | None:
    """Name and driver version of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True)
    except OSError:
        return None
    return answer.stdout.splitlines()[0] if answer.returncode == 0 and answer.stdout else None


def check_plugin() -> None:
    """vLLM finds vllm-kvx by its entry point; without it a policy would be ignored in silence."""
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(entry.value.startswith("vllm_kvx.") for entry in found):
        raise RuntimeError(
            "vLLM would not load vllm-kvx: no entry point of it is installed. Run "
            "`pip install --no-deps -e .`, or put the folder with vllm_kvx.egg-info on PYTHONPATH."
        )
