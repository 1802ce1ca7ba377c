"""Device time and what it is spent on, by policy."""

import time

import pytest
import torch

from vllm_kvx.worker.timing import PhaseTimer, shares_of


def test_shares_add_up() -> None:
    assert shares_of([(3, 10), (0, 20), (3, 10)]) == {3: 0.5, 0: 0.5}
    assert shares_of([]) == shares_of([(1, 0)]) == {}


def test_time_is_of_those_that_it_was_spent_on() -> None:
    timer = PhaseTimer(torch.device("cpu"))
    with timer.of({0: 1.0}):
        time.sleep(0.002)
    first = timer.seconds
    with timer.of({0: 0.25, 2: 0.75}):
        time.sleep(0.002)
    second, both = timer.seconds - first, timer.seconds_by_row
    assert both == {0: pytest.approx(first + 0.25 * second), 2: pytest.approx(0.75 * second)}
    with timer:
        time.sleep(0.002)
    assert timer.seconds_by_row == both, "nobody's"
    assert timer.seconds > sum(both.values())
