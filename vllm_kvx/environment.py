"""Variables of the environment: switches, and where the package keeps what it makes."""

import os
from pathlib import Path

CACHE_VARIABLE = "KVX_CACHE_ROOT"
_OFF = ("", "0", "false", "no", "off")


def is_on(variable: str) -> bool:
    """Whether `variable` is set, to anything but 0, false, no or off, in any case."""
    return os.environ.get(variable, "").strip().lower() not in _OFF


def cache_root() -> Path:
    """`$KVX_CACHE_ROOT`, else `$XDG_CACHE_HOME/vllm-kvx`, else `~/.cache/vllm-kvx`."""
    if root := os.environ.get(CACHE_VARIABLE):
        return Path(root).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vllm-kvx"
