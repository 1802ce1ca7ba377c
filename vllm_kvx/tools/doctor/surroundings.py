"""The variables of the environment, and the folder of what was measured."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vllm_kvx.config.environment import REPLACED, instead_of
from vllm_kvx.config.spelling import misspelling
from vllm_kvx.records.folder import CACHE_VARIABLE, CacheFolderError, cache_root
from vllm_kvx.tools.doctor.findings import Context, Finding, note, ok, problem

# All that vllm-kvx and its scripts read. Names alone: reading some of them imports torch.
VARIABLES = (
    "KVX_ALLOW_UNTESTED_VLLM",
    "KVX_CACHE_ROOT",
    "KVX_CALIBRATION_LIMIT",
    "KVX_CPU",
    "KVX_RETRIEVAL_ONE_LAUNCH",
    "KVX_RETRIEVAL_OPS",
)
# Read where the package is built.
BUILD_VARIABLES = ("KVX_BUILD_OPS",)


def variables(_: Context) -> Iterator[Finding]:
    """Which variables of ours are set, and which resemble one and have no effect."""
    known = (*VARIABLES, *BUILD_VARIABLES)
    is_set = [name for name in VARIABLES if os.environ.get(name)]
    for name in is_set:
        yield ok(f"{name}={os.environ[name]}")
    for name in sorted(os.environ):
        if name in known or "KVX" not in name.upper():
            continue
        if name in REPLACED:
            yield problem(f"{name} is no longer read", instead_of(name))
            continue
        near = misspelling([name], known)
        if near is not None:
            yield problem(
                f"{name} is no variable of vllm-kvx and has no effect; did you mean {near.name}?",
                f"unset {name}; export {near.name}={os.environ[name]}",
            )
        elif name.upper().startswith("KVX_"):
            yield note(f"{name} is no variable of vllm-kvx; it reads {', '.join(VARIABLES)}")
    if not is_set:
        yield ok("no variable of vllm-kvx is set")


def cache_folder(_: Context) -> Iterator[Finding]:
    """Whether measurements can be kept, and how many there are."""
    try:
        root = cache_root()
    except CacheFolderError as error:
        yield note(str(error), f"export {CACHE_VARIABLE}=DIR")
        return
    if why := why_not_writable(root):
        yield note(
            f"{root} cannot be written ({why}): records in it are read, and no new ones kept",
            f"export {CACHE_VARIABLE}=DIR, a folder that you may write",
        )
    else:
        free = shutil.disk_usage(_existing(root)).free
        yield ok(f"{root} can be written, {free / 2**30:.1f} GiB free")
    for kind, words in (("calibration", "measured layers"), ("evaluation", "evaluations")):
        folder = root / kind
        records = list(folder.glob("*.json")) if folder.is_dir() else []
        yield ok(f"records of {words}: {len(records)}")


def why_not_kept() -> str:
    """Why what is measured cannot be kept; empty if it can. Makes nothing."""
    try:
        return why_not_writable(cache_root())
    except CacheFolderError as error:
        return str(error)


def why_not_writable(root: Path) -> str:
    """Why nothing can be stored below `root`, which need not exist; empty if it can."""
    place = _existing(root)
    if not place.is_dir():
        return f"{place} is no folder"
    if place != root:
        return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} is not writable"
    try:
        with tempfile.TemporaryFile(dir=root):
            return ""
    except OSError as error:
        return str(error.strerror)


def _existing(path: Path) -> Path:
    """The nearest of `path` and its parents that exists."""
    while not os.path.exists(path) and path != path.parent:  # path.exists() may raise.
        path = path.parent
    return path
