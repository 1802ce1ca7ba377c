"""Kernels run on the CPU mode's interpreter by day, and by night on the one that Triton brings."""

from collections.abc import Iterator

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
