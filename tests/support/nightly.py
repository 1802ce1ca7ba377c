"""What the nightly run has besides: longer repetitions of what shorter tests show."""

from collections.abc import Container, Sequence
from typing import Any

import pytest

# `--nightly` runs them too.
nightly = pytest.mark.nightly


def by_day(cases: Sequence[Any], days: Container[int]) -> list[Any]:
    """The cases, of which those at other indices than `days` wait for the night.

    For cases of one shape, that differ in what other tests vary too.
    """
    return [
        case
        if index in days
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=nightly)
        for index, case in enumerate(cases)
    ]
