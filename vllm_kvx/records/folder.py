"""The folder where measurements are kept, for other servers and for the next start to find.

Whatever reads or writes there asks this module, so that every message about the folder says which
variable moves it.
"""

import logging
import os
import tempfile
from functools import cache
from pathlib import Path

from vllm_kvx.errors import ToolError

# A child of vLLM's logger: within a server it is formatted as the rest of the log.
logger = logging.getLogger("vllm.kvx.cache_folder")

CACHE_VARIABLE = "KVX_CACHE_ROOT"
# What a message about the folder ends in.
WAY_OUT = f"set {CACHE_VARIABLE} to a directory that can be written"


class CacheFolderError(ToolError):
    """There is no cache folder; the message says which variable to set."""


def cache_root() -> Path:
    """`$KVX_CACHE_ROOT`, else `$XDG_CACHE_HOME/vllm-kvx`, else `~/.cache/vllm-kvx`.

    It need not exist.

    Raises:
        CacheFolderError: this user has no home directory, as in a container whose user id is not in
            its /etc/passwd.
    """
    root = os.environ.get(CACHE_VARIABLE)
    base = root or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        path = Path(base).expanduser()
    except RuntimeError as error:
        raise CacheFolderError(
            f"no folder to keep measurements in: {base} needs a home directory, and HOME is not "
            f"set for user id {os.getuid()}; {WAY_OUT}"
        ) from error
    return path if root else path / "vllm-kvx"


def root_to_read() -> Path | None:
    """`cache_root`; None if there is none, which a warning tells once: nothing is kept there."""
    try:
        return cache_root()
    except CacheFolderError as error:
        _warn_once(str(error))
        return None


def cache_problem(part: str = "") -> str:
    """Why nothing can be kept in the cache folder, or in `part` of it; empty if something can.

    What is missing of the folder is made. The text ends with what to change.
    """
    try:
        check_writable(cache_root() / part, WAY_OUT)
    except ToolError as error:
        return str(error)
    return ""


def check_writable(directory: Path, hint: str) -> None:
    """Make `directory` and write to it; ToolError, which ends in `hint`, if that cannot be done."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ToolError(f"cannot write to {directory}: {error.strerror}; {hint}") from error


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
