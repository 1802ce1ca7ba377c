"""Triton kernels that are compiled before their first launch, beside other work of a start.

A kernel takes Triton about a second: its front end, its passes and LLVM's, ptxas, and a C compiler
for what launches it, all but the first without Python's lock. In a thread of its own a start waits
for little of that.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

_here = threading.local()
_lock = threading.Lock()


class Compiled:
    """What `compiling` has compiled. names: of the kernels, one for every launch."""

    def __init__(self) -> None:
        self.names: list[str] = []


@contextlib.contextmanager
def compiling() -> Iterator[Compiled]:
    """Inside, and in this thread alone, a launch compiles its kernel and runs nothing.

    New tensors have no memory, and nothing is computed with them: give operators what has the right
    dtypes, shapes and devices. Arithmetic on real tensors alone would be done, so take no more than
    views of those. A tensor without memory counts as aligned, as vLLM's are. What is compiled is
    what the same launch finds later, in any thread of this process, on the current device. Not for
    kernels that Triton interprets.

    Raises:
        RuntimeError: it is inside of itself.
    """
    if getattr(_here, "compiled", None) is not None:
        raise RuntimeError("this thread compiles already")
    compiled = Compiled()
    with _lock:
        stock = JITFunction.run
        JITFunction.run = ours = _compile_here(stock)
        _here.compiled = compiled
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                yield compiled
        finally:
            _here.compiled = None
            # Who has patched it meanwhile calls ours, which is harmless.
            if JITFunction.run is ours:
                JITFunction.run = stock


def _compile_here(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`JITFunction.run` that launches as ever in other threads."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        compiled: Compiled | None = getattr(_here, "compiled", None)
        if compiled is None:
            return stock(kernel, *args, grid=grid, warmup=warmup, **constants)
        assert not any(isinstance(each, FakeTensor) for each in constants.values())
        mocks = [MockTensor(arg.dtype) if isinstance(arg, FakeTensor) else arg for arg in args]
        made = stock(kernel, *mocks, grid=grid, warmup=True, **constants)
        if made is not None:
            # What launches it is compiled, too, at the first launch, unless it is on the disk.
            driver.active.launcher_cls(made.src, made.metadata)
        compiled.names.append(kernel.fn.__name__)
        return made

    return run
