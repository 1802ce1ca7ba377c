"""Kernels run on the CPU mode's interpreter by day, and by night on the one that Triton brings."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import options

ON_CPU = not torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def one_thread_on_cpu() -> None:
    if ON_CPU:
        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def stock_by_night() -> Iterator[None]:
    if not ON_CPU or not options.nightly():
        yield
        return
    # It turns the CPU mode on, which has to have been before.
    import vllm.triton_utils  # noqa: F401

    from vllm_kvx.compat.quick_interpreter import stock_interpreter

    with stock_interpreter():
        yield


@pytest.fixture
def bfloat16_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes bfloat16 for the integers that it stores it in, in two places."""
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        wide = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, *wide, *args)

    def cast_impl(self: Any, value: Any, to: Any) -> Any:
        if to.scalar == tl.bfloat16 and value.dtype.scalar.is_int():
            value = cast(self, value, tl.float32)
        return cast(self, value, to)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
