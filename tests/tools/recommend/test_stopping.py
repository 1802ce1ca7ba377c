"""When `vllm-kvx recommend` stops: rounds, the intervals of its looks, and the clock."""

import random
from typing import Any

import pytest

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate.intervals import Interval, of_kept
from vllm_kvx.tools.recommend.rounds import Clock
from vllm_kvx.tools.recommend.stopping import (
    Verdict,
    least_questions,
    level_of,
    questions_of,
    rounds_of,
    verdict,
)


def test_rounds_double() -> None:
    assert rounds_of(512) == [16, 32, 64, 128, 256, 512]
    assert rounds_of(100) == [16, 32, 64, 100]
    assert rounds_of(5) == [5]


def test_looks_share_the_error() -> None:
    assert level_of(1) == pytest.approx(0.95)
    assert 1 - level_of(5) == pytest.approx(0.01)
    alike = [(1.0, 1.0)] * 60
    (one, many) = (of_kept(alike, level_of(looks)) for looks in (1, 6))
    assert one is not None and many is not None
    assert one.value == many.value == one.high == many.high == 1
    assert many.low < one.low == pytest.approx(60 / (60 + 1.96**2), abs=1e-3)


def test_one_loss_proves_no_more_than_none() -> None:
    level = level_of(6)
    none, one = (of_kept([(1, 1)] * (60 - k) + [(0, 1)] * k, level) for k in (0, 1))
    assert none is not None and one is not None and one.low < none.low
    assert of_kept([(0.0, 0.0)] * 9, level) is None


def test_an_interval_decides() -> None:
    assert verdict(Interval(1.0, 0.98, 1.0), 0.97) is Verdict.KEPT
    assert verdict(Interval(0.9, 0.8, 0.96), 0.97) is Verdict.LOST
    assert verdict(Interval(0.98, 0.9, 1.0), 0.97) is Verdict.UNDECIDED
    assert verdict(None, 0.97) is Verdict.UNDECIDED


@pytest.mark.parametrize(("share", "wrong"), [(0.7, Verdict.KEPT), (0.9, Verdict.LOST)])
def test_a_run_of_looks_rarely_errs(share: float, wrong: Verdict) -> None:
    """Policies that keep too little, or enough, are looked at after every round."""
    ends, keep, errors = rounds_of(64), 0.8, 0
    for seed in range(40):
        rng = random.Random(seed)
        scores = [(float(rng.random() < share), 1.0) for _ in range(ends[-1])]
        looks = (verdict(of_kept(scores[:end], level_of(len(ends))), keep) for end in ends)
        decided = next((each for each in looks if each is not Verdict.UNDECIDED), None)
        errors += decided is wrong
    assert errors <= 1


def test_how_many_answers_a_share_takes() -> None:
    assert 200 < least_questions(0.97, 6) < 240
    assert questions_of(0.97, None) == 512 and questions_of(0.99, None) > 1398
    with pytest.raises(ToolError, match=r"--samples 100: .*97.0% by fewer than \d+ right ones"):
        questions_of(0.97, 100)
    with pytest.raises(ToolError, match="--keep 1: no number of answers"):
        questions_of(1.0, None)


class Quiet:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_the_clock_knows_its_pace() -> None:
    now, clock = Quiet(), None
    clock = Clock(1, now)
    row: Any = "row"
    assert clock.has_time_for(row, 100)

    def answer() -> None:
        now.seconds += 20

    clock.time(row, 4, answer)
    assert clock.has_time_for(row, 7) and not clock.has_time_for(row, 8)
    # The fastest of the others tells of one that nobody has asked.
    other: Any = "other"
    assert not clock.has_time_for(other, 8)
    assert Clock(None, now).has_time_for(row, 10**9)
