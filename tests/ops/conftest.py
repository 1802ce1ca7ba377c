"""Kernels run on a quick interpreter by day, and by night on the one that Triton brings."""

import pytest
import torch
from support import interpreter, options


@pytest.fixture(scope="session", autouse=True)
def quick_by_day() -> None:
    if not torch.cuda.is_available() and not options.nightly():
        interpreter.quicken()
