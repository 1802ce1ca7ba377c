"""Builds the CUDA operators: `vllm-kvx build-ops`, or python -m vllm_kvx.ops.build

They are optional: without them the Triton kernels do the work. Their sources come with the package,
in `csrc/`. The build needs nvcc and a C++ compiler, and torch's headers, but no GPU and no CUDA
build of torch. It runs on torch 2.10 and later, whatever version it was built beside.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvx.config.arguments import positive
from vllm_kvx.errors import ToolError, vllm_needed
from vllm_kvx.ops import LIBRARY
from vllm_kvx.ops.library import COMMAND, FLAGS, SOURCES, cache_folder, key_of, record
from vllm_kvx.records.folder import CACHE_VARIABLE

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

ARCHITECTURES = ("80", "90a")
_OLDEST = "12.8"  # CUDA's.
# Asks which package a server of this environment imports: not the one of the folder it starts in.
_ASK = "from vllm_kvx.ops import library; print(library.LIBRARY, library.key_of(), sep='\\n')"


def build(
    architectures: Sequence[str] = ARCHITECTURES,
    *,
    sources: Path = SOURCES,
    output: Path = LIBRARY,
    nvcc: str | None = None,
    jobs: int | None = None,
    verbose: bool = False,
) -> Path:
    """Compiles and links the operators, says on stderr how far it is, and returns where they are.

    Args:
        architectures: compute capabilities to build for, such as "90a".
        sources: folder of the CUDA sources. output: the shared library to write.
        nvcc: compiler, by its path or as a command in PATH; default that of CUDA_HOME, or of PATH.
        jobs: sources compiled at a time; default one per CPU core.
        verbose: also print what the compiler says about registers.

    Raises:
        ToolError: no compiler, one that is too old, no sources, or they do not compile.
    """
    units = sorted([*sources.glob("*.cu"), *sources.glob("*.cpp")])
    if not units:
        raise ToolError(f"no CUDA sources in {sources}: install vllm-kvx again")
    compiler = _program(nvcc) if nvcc is not None else _find_nvcc()
    flags = [*FLAGS, *(f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures)]
    flags += [f"-isystem={_torch_folder() / 'include'}"]
    if verbose:
        flags += ["-Xptxas", "-v"]
    version = _version_of(compiler)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        named = Path(folder) / "record.cpp"
        text = record(key_of(sources), tuple(architectures))
        named.write_text(f'__attribute__((used)) static const char record[] = "{text}";\n')
        units.append(named)
        objects = [Path(folder) / f"{unit.stem}_{unit.suffix[1:]}.o" for unit in units]
        commands = {
            unit.name: [compiler, *flags, "-c", str(unit), "-o", str(to)]
            for unit, to in zip(units, objects, strict=True)
        }
        jobs = min(jobs or os.cpu_count() or 1, len(units))
        _say(
            f"Compiling {len(units)} sources for {' and '.join(architectures)}, {jobs} at a time, "
            f"with {compiler}{version and f' of CUDA {version}'}: this takes minutes"
        )
        _run_all(commands, jobs)
        _say(f"Linking, {time.monotonic() - begin:.0f} s after the start")
        linked = Path(folder) / output.name
        command = [compiler, "-shared", "-o", str(linked), *map(str, objects)]
        _run([*command, *_torch_libraries(Path(folder), compiler)])
        output.parent.mkdir(parents=True, exist_ok=True)
        # Not in place: a process that has the old one loaded must go on.
        staged = output.with_suffix(f".{os.getpid()}.new")
        try:
            shutil.copy(linked, staged)
            staged.replace(output)
        finally:
            staged.unlink(missing_ok=True)
    return output


def _find_nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    in_home = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    found = None if home else shutil.which("nvcc")
    if found is None and in_home.exists():
        found = str(in_home)
    if found is None:
        raise ToolError(
            f"nvcc is missing: install the CUDA toolkit ({_OLDEST} or later) and set CUDA_HOME or "
            "PATH; vllm-kvx also runs without its CUDA operators"
        )
    return found


def _program(nvcc: str) -> str:
    """The compiler that was named, by its path or as a command in PATH.

    Raises:
        ToolError: it is no program.
    """
    if found := shutil.which(nvcc):
        return found
    path = Path(nvcc)
    if path.is_dir():
        inside = [
            f", --nvcc {each}" for each in (path / "bin/nvcc", path / "nvcc") if each.exists()
        ]
        why = "is a folder: name the compiler in it" + "".join(inside[:1])
    elif path.exists():
        why = "is not executable"
    elif path.name == nvcc:
        why = "is not in PATH: name the compiler's path, or set CUDA_HOME"
    else:
        why = "is not there: name a compiler, or set CUDA_HOME"
    raise ToolError(f"--nvcc {nvcc} {why}")


def _version_of(compiler: str) -> str:
    """The release of CUDA that the compiler is of; empty if it does not say.

    Raises:
        ToolError: it cannot be run, or is too old.
    """
    asked = _result_of([compiler, "--version"])
    lines = (asked.stdout + asked.stderr).strip().splitlines()
    if asked.returncode:
        last = lines[-1] if lines else f"exit code {asked.returncode}"
        raise ToolError(f"{compiler} --version fails: {last}")
    found = re.search(r"release (\d+\.\d+)", " ".join(lines))
    if found is None:
        return ""
    if [int(part) for part in found[1].split(".")] < [int(part) for part in _OLDEST.split(".")]:
        raise ToolError(
            f"{compiler} is of CUDA {found[1]}, and the operators need {_OLDEST} or later: install "
            "that, or name another by --nvcc"
        )
    return found[1]


def _torch_folder() -> Path:
    # Not imported: that takes seconds.
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return Path(spec.origin).parent


def _torch_libraries(folder: Path, compiler: str) -> list[str]:
    """Linker arguments by which the loader looks symbols up in torch's libraries.

    Only their names matter, torch has loaded them before. Where one is missing, as is that of CUDA
    in a CPU build of torch, an empty library of that name stands in.
    """
    arguments = ["-Xlinker", "--no-as-needed", f"-L{folder}"]
    real = _torch_folder() / "lib"
    for name in ("torch_cpu", "torch_cuda"):
        file = f"lib{name}.so"
        if (real / file).exists():
            arguments += [str(real / file), "-Xlinker", "--allow-shlib-undefined"]
            continue
        empty = folder / "empty.cpp"
        empty.write_text("")
        stand_in = str(folder / file)
        _run([compiler, "-shared", "-Xlinker", f"-soname={file}", str(empty), "-o", stand_in])
        arguments.append(f"-l{name}")
    return arguments


def _say(text: str) -> None:
    """Progress, on stderr: stdout has the library's path alone."""
    print(text, file=sys.stderr, flush=True)


def _run_all(commands: Mapping[str, list[str]], jobs: int) -> None:
    """Runs commands, by what they compile, several at a time, and says how far it is.

    Raises:
        ToolError: one failed; those that had not begun are not run.
    """
    waiting, running, said = list(commands), dict[Future[None], tuple[str, float]](), ""
    with ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                running[pool.submit(_run, commands[name])] = (name, time.monotonic())
            done = len(commands) - len(waiting) - len(running)
            names = ", ".join(name for name, _ in running.values())
            _say(f"[{done}/{len(commands)}] {said}compiling {names}")
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            said = ""
            for each in finished:
                name, begin = running.pop(each)
                each.result()
                said += f"{name} took {time.monotonic() - begin:.0f} s; "
    _say(f"[{len(commands)}/{len(commands)}] {said.removesuffix('; ')}")


def _run(command: list[str]) -> None:
    result = _result_of(command)
    said = result.stdout + result.stderr
    if result.returncode:
        raise ToolError(f"{' '.join(command)} failed:\n{said}")
    if said:
        print(said, file=sys.stderr, end="")


def _result_of(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise ToolError(f"{command[0]} cannot be run: {error.strerror}") from error


def place(architectures: Sequence[str]) -> Path:
    """The path at which servers of this environment find a library.

    That is the package's folder. The cache folder takes its place where the former cannot be
    written, and where servers import another copy of the package than runs here: with the same
    sources they look there too.

    Raises:
        ToolError: neither can be written.
    """
    theirs = imported_by_servers()
    if (theirs is None or theirs[0] == LIBRARY) and _is_writable(LIBRARY.parent):
        return LIBRARY
    folder = cache_folder()
    if folder is None or not _is_writable(folder):
        raise ToolError(
            f"neither {LIBRARY.parent} nor {folder or 'a home directory'} can be written: set "
            f"{CACHE_VARIABLE} to a directory that can, here and for the server"
        )
    # Machines that share a cache folder may have other GPUs.
    return folder / f"{'-'.join(sorted(architectures))}.so"


def imported_by_servers() -> tuple[Path, str] | None:
    """Library and key of the package that servers of this environment import; None without one.

    A checkout that `python -m` runs in need not be that package.
    """
    asked = subprocess.run([sys.executable, "-P", "-c", _ASK], capture_output=True, text=True)
    if asked.returncode:
        return None
    library, key = asked.stdout.splitlines()
    return Path(library), key


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _list_as_installed(library: Path) -> None:
    """Has installers remove `library` with the package that it lies in, if they installed that."""
    try:
        files = metadata.distribution("vllm-kvx").files or []
    except metadata.PackageNotFoundError:
        return
    by_path = {Path(str(file.locate())): file for file in files}
    beside = by_path.get(Path(__file__))
    records = [path for path in by_path if path.name == "RECORD"]
    if beside is None or library in by_path or not records:
        return
    # Not in place: an installer may have linked the file to its own cache.
    staged = records[0].with_name(f"RECORD.{os.getpid()}")
    shutil.copy(records[0], staged)
    with staged.open("a", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow([beside.with_name(library.name), "", ""])
    staged.replace(records[0])


def add_build_ops(commands: "_Commands") -> None:
    """`vllm-kvx build-ops` and its options."""
    command = commands.add_parser(
        "build-ops",
        help="build the CUDA ops of fier and quest",
        description="Builds the CUDA operators of fier and quest from the sources in the package, "
        "and puts them where servers of this environment look.",
    )
    command.set_defaults(run=run)
    _add_options(command)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        type=architecture,
        action="append",
        metavar="CC",
        help="compute capability, such as 90a; may be repeated (default: "
        f"{' and '.join(ARCHITECTURES)})",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help=f"default: {LIBRARY}, or the cache folder if that cannot be written",
    )
    parser.add_argument("--nvcc", metavar="PATH", help="default: that of CUDA_HOME, or in PATH")
    parser.add_argument("--jobs", type=positive, metavar="N", help="default: one per CPU core")
    parser.add_argument("--verbose", action="store_true", help="show registers of each kernel")


def architecture(text: str) -> str:
    """A compute capability as nvcc has it, "90a", also where it is written "9.0a" or "sm_90a"."""
    name = text.strip().lower().removeprefix("sm_").replace(".", "")
    if not re.fullmatch(r"\d{2,3}[af]?", name):
        raise argparse.ArgumentTypeError(f"must be a compute capability such as 90a, got {text!r}")
    return name


def run(args: argparse.Namespace) -> None:
    """What the command does with its options; prints where the library is.

    Raises:
        ToolError: see ``build`` and ``place``.
    """
    architectures = tuple(dict.fromkeys(args.arch or ARCHITECTURES))
    if args.output is None:
        output = place(architectures)
    else:
        # Not after minutes of compiling.
        output = args.output
        if output.is_dir():
            raise ToolError(f"--output {output} is a folder: name the file to write")
        if not _is_writable(output.parent):
            raise ToolError(f"--output {output} cannot be written: name a file where you may write")
    build(architectures, output=output, nvcc=args.nvcc, jobs=args.jobs, verbose=args.verbose)
    if output == LIBRARY:
        _list_as_installed(output)
    print(output)
    theirs = imported_by_servers()
    if args.output is None and theirs is not None and theirs[1] != key_of():
        print(
            f"Servers of this environment import another vllm-kvx, in {theirs[0].parents[1]}, of "
            f"other sources: to build the CUDA ops for it, run `{COMMAND}`.",
            file=sys.stderr,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's) and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvx.ops.build", description="Builds the CUDA operators."
    )
    _add_options(parser)
    args = parser.parse_args(argv)
    try:
        with vllm_needed():
            run(args)
    except ToolError as error:
        print(f"build_ops: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
