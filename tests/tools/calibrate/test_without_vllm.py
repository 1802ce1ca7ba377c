"""What the commands do where vLLM, or what comes with it, is not installed."""

import subprocess
import sys

import pytest
from support.nightly import by_day

# Modules that are None cannot be imported.
RUN = """
import runpy, sys
for name in {missing}:
    sys.modules[name] = None
sys.argv = {argv}
runpy.run_module(sys.argv[0], run_name="__main__")
"""
CLI, BUILD = "vllm_kvx.cli", "vllm_kvx.ops.build"
ALL = ("torch", "transformers", "vllm", "huggingface_hub")


def run(missing: tuple[str, ...], *argv: str) -> "subprocess.CompletedProcess[str]":
    code = RUN.format(missing=missing, argv=list(argv))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    "argv",
    [(CLI, "--help"), (CLI, "calibrate", "--help"), (CLI, "diagnose", "--help"), (BUILD, "--help")],
    ids=" ".join,
)
def test_help_needs_none_of_it(argv: tuple[str, ...]) -> None:
    ran = run(ALL, *argv)
    assert ran.returncode == 0 and ran.stdout.startswith("usage:") and not ran.stderr


@pytest.mark.parametrize(
    ("argv", "missing"),
    by_day(
        [
            (argv, missing)
            for argv in (("calibrate",), ("calibrate", "--method", "structkv"), ("diagnose",))
            for missing in ("torch", "transformers")
        ],
        {0, 5},
    ),
)
def test_the_commands_say_what_to_install(argv: tuple[str, ...], missing: str) -> None:
    ran = run((missing,), CLI, *argv, "model")
    assert ran.returncode == 2 and not ran.stdout
    how = f"{missing} is missing: pip install 'vllm-kvx[cuda]' or [cpu]\n"
    assert ran.stderr == f"vllm-kvx {argv[0]}: error: {how}"


def test_the_build_says_what_to_install() -> None:
    """A compiler is there: any program will do, since none is run."""
    ran = run(ALL, BUILD, "--nvcc", sys.executable)
    assert ran.returncode == 2 and not ran.stdout
    how = "torch is missing: pip install 'vllm-kvx[cuda]' or [cpu]\n"
    assert ran.stderr == f"build_ops: error: {how}"


def test_vllm_itself_missing() -> None:
    """Whatever imports it, one line says so; another module's lack stays an error of its own."""
    from vllm_kvx.errors import ToolError, vllm_needed

    for name in ("vllm", "httpx"):  # A batch's client has nothing but the latter from vLLM.
        with pytest.raises(ToolError, match=f"{name} is missing: pip install"), vllm_needed():
            raise ModuleNotFoundError(name=name)
    with pytest.raises(ModuleNotFoundError), vllm_needed():
        raise ModuleNotFoundError(name="numpy")
