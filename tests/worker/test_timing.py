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
    for shares in ({0: 1.0}, {0: 0.25, 2: 0.75}):
        with timer.of(shares):
            time.sleep(0.002)
    both = timer.seconds_by_row
    assert both[0] > both[2] > 0
    assert sum(both.values()) == pytest.approx(timer.seconds)
    with timer:
        time.sleep(0.002)
    assert timer.seconds_by_row == both, "nobody's"
    assert timer.seconds > sum(both.values())
