"""Where the CUDA operators lie once they are built, and whether they are of these sources.

`vllm-kvx build-ops` writes them beside this module, where it may, and else into the cache folder. A
server looks in both. A library names the sources and the architectures that it was built from, so
that one of other sources is never loaded. All this needs neither torch nor a GPU.
"""

import hashlib
import mmap
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vllm_kvx.ops import LIBRARY
from vllm_kvx.records.folder import CacheFolderError, cache_root

COMMAND = "vllm-kvx build-ops"
_PACKAGE = Path(__file__).parents[1]
# At the root of a checkout; setup.py puts a copy into the package that is installed.
SOURCES = _PACKAGE / "csrc"
if not SOURCES.is_dir():
    SOURCES = _PACKAGE.parent / "csrc"
# torch 2.10, whose stable ABI is the oldest that has all that the operators use.
_TORCH_TARGET = "0x020a000000000000"
FLAGS = (
    *("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"),
    *("-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}"),
)
_SUFFIXES = (".cu", ".cuh", ".cpp", ".h")
# What `record` writes.
_RECORD = re.compile(rb"@vllm-kvx-ops key=([0-9a-f]+) architectures=([0-9a-z,]+)@")


@dataclass(frozen=True)
class Library:
    """A library of CUDA operators.

    key: of what it was built from, see ``key_of``. architectures: such as "90a".
    """

    path: Path
    key: str
    architectures: tuple[str, ...]

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it has machine code for GPUs of this compute capability."""
        return any(_runs_on(each, capability) for each in self.architectures)


def record(key: str, architectures: tuple[str, ...]) -> str:
    """What a library says about itself, compiled into it."""
    return f"@vllm-kvx-ops key={key} architectures={','.join(architectures)}@"


@cache
def key_of(sources: Path = SOURCES) -> str:
    """Stands for all that a library is built from, but for its architectures: 16 hex digits."""
    digest = hashlib.sha256()
    for part in (platform.machine(), *FLAGS):
        digest.update(part.encode() + b"\0")
    for file in sorted(path for path in sources.glob("*") if path.suffix in _SUFFIXES):
        content = file.read_bytes()
        digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def read(path: Path) -> Library | None:
    """The library in `path`; None if there is none, or one that does not say what it is of."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _RECORD.search(data)
            if found is None:
                return None
            key, architectures = (group.decode() for group in found.groups())
    except (OSError, ValueError):  # ValueError: an empty file.
        return None
    return Library(path, key, tuple(architectures.split(",")))


def cache_folder() -> Path | None:
    """The folder of libraries of these sources beside the package's own; None without a home."""
    try:
        return cache_root() / "ops" / key_of()
    except CacheFolderError:
        return None


def found() -> list[Library]:
    """The libraries of these sources that are there, the package's own first."""
    folder = cache_folder()
    paths = [LIBRARY, *(sorted(folder.glob("*.so")) if folder else [])]
    return [each for each in map(read, paths) if each is not None and each.key == key_of()]


def missing() -> str:
    """Why there is no library of these sources, and what to do; empty if there is one."""
    if found():
        return ""
    if LIBRARY.exists():
        return f"{LIBRARY} is built from other sources than this vllm-kvx: run `{COMMAND}`"
    places = " or ".join(str(place) for place in (LIBRARY.parent, cache_folder()) if place)
    return f"CUDA ops are not built in {places}: run `{COMMAND}`"


def not_for(libraries: list[Library], capability: tuple[int, int]) -> str:
    """Why none of `libraries` runs on a GPU of this compute capability, and what to do."""
    major, minor = capability
    built = " or ".join(f"{each.path} ({', '.join(each.architectures)})" for each in libraries)
    architecture = "90a" if capability == (9, 0) else f"{major}{minor}"
    return (
        f"no CUDA ops for compute capability {major}.{minor} in {built}: "
        f"run `{COMMAND} --arch {architecture}`"
    )


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU of `capability` runs machine code that was built for `architecture`.

    Code runs on later minor versions of its major one; with `a` on its own alone.
    """
    number = int(architecture.rstrip("af"))
    major, minor = divmod(number, 10)
    if architecture.endswith("a"):
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor
