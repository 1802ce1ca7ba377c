"""Builds the CUDA operators in `csrc/`: python -m vllm_kvx.ops.build

They are optional: without them the Triton kernels do the work. The build needs nvcc and a C++
compiler, and torch's headers, but no GPU and no CUDA build of torch. It runs on torch 2.10 and
later, whatever version it was built beside.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_kvx.errors import ToolError, vllm_needed
from vllm_kvx.ops import LIBRARY

ARCHITECTURES = ("80", "90a")
SOURCES = Path(__file__).parents[2] / "csrc"
# torch 2.10, whose stable ABI is the oldest that has all that the operators use.
_TORCH_TARGET = "0x020a000000000000"


def build(
    architectures: Sequence[str] = ARCHITECTURES,
    *,
    sources: Path = SOURCES,
    output: Path = LIBRARY,
    nvcc: str | None = None,
    jobs: int | None = None,
    verbose: bool = False,
) -> Path:
    """Compiles and links the operators, and returns where they are.

    Args:
        architectures: compute capabilities to build for, such as "90a".
        sources: folder of the CUDA sources. output: the shared library to write.
        nvcc: compiler; default that of CUDA_HOME, or the one in PATH.
        jobs: sources compiled at a time; default one per CPU core.
        verbose: also print what the compiler says about registers.

    Raises:
        ToolError: no compiler, no sources, or they do not compile.
    """
    compiler = nvcc or _find_nvcc()
    units = sorted([*sources.glob("*.cu"), *sources.glob("*.cpp")])
    if not units:
        raise ToolError(f"no CUDA sources in {sources}: run this in a checkout of vllm-kvx")
    flags = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"]
    flags += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    flags += ["-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={_TORCH_TARGET}"]
    flags += [f"-isystem={_torch_folder() / 'include'}"]
    if verbose:
        flags += ["-Xptxas", "-v"]
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{unit.stem}_{unit.suffix[1:]}.o" for unit in units]
        commands = [
            [compiler, *flags, "-c", str(unit), "-o", str(to)]
            for unit, to in zip(units, objects, strict=True)
        ]
        with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder) / output.name
        command = [compiler, "-shared", "-o", str(linked), *map(str, objects)]
        _run([*command, *_torch_libraries(Path(folder), compiler)])
        output.parent.mkdir(parents=True, exist_ok=True)
        # Not in place: a process that has the old one loaded must go on.
        staged = output.with_suffix(".new")
        shutil.copy(linked, staged)
        staged.replace(output)
    return output


def _find_nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    in_home = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    found = None if home else shutil.which("nvcc")
    if found is None and in_home.exists():
        found = str(in_home)
    if found is None:
        raise ToolError(
            "nvcc is missing: install the CUDA toolkit (12.8 or later) and set CUDA_HOME or PATH; "
            "vllm-kvx also runs without its CUDA operators"
        )
    return found


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).parent


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


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    said = result.stdout + result.stderr
    if result.returncode:
        raise ToolError(f"{' '.join(command)} failed:\n{said}")
    if said:
        print(said, file=sys.stderr, end="")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's) and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvx.ops.build", description="Builds the CUDA operators."
    )
    parser.add_argument(
        "--arch",
        action="append",
        help="compute capability, such as 90a; may be repeated (default: "
        f"{' and '.join(ARCHITECTURES)})",
    )
    parser.add_argument("--output", type=Path, default=LIBRARY, help="default: %(default)s")
    parser.add_argument("--nvcc", help="default: that of CUDA_HOME, or in PATH")
    parser.add_argument("--jobs", type=int, help="default: one per CPU core")
    parser.add_argument("--verbose", action="store_true", help="show registers of each kernel")
    args = parser.parse_args(argv)
    try:
        with vllm_needed():
            built = build(
                args.arch or ARCHITECTURES,
                output=args.output,
                nvcc=args.nvcc,
                jobs=args.jobs,
                verbose=args.verbose,
            )
    except ToolError as error:
        print(f"build_ops: error: {error}", file=sys.stderr)
        return 2
    print(built)
    return 0


if __name__ == "__main__":
    sys.exit(main())
