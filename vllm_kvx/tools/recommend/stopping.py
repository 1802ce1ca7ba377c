"""When the answers so far decide: whether a policy keeps the share that was asked for, or not.

A run looks at a policy after every round, and stops asking it as soon as the interval of its share
lies on one side. Who looks often errs often, so the looks share the error: of a run that may look R
times each look has an interval of 1 - 0.05 / R (Bonferroni's split, equal parts). So all R
intervals of a policy hold together with 95%, whenever the run stops, and a policy that keeps less
than was asked for is taken for one that keeps it in at most 1 of 40 runs. This is for each policy
by itself, and not for all of a ladder together. A run that goes on where the time ended another
looks once more at that round, which the split leaves out; one with more samples over the same
answers has an error of its own.
"""

import math
from enum import StrEnum

from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate.intervals import LEVEL, Interval, of_mean
from vllm_kvx.tools.recommend.defaults import FIRST, MOST


class Verdict(StrEnum):
    """What is known of a policy. `OUTDONE`: another keeps the answers and gains more."""

    KEPT = "kept"
    LOST = "lost"
    UNDECIDED = "undecided"
    OUTDONE = "outdone"


def rounds_of(questions: int, first: int = FIRST) -> list[int]:
    """How many questions were asked after each round, at most `questions`: 16, 32, 64 ..."""
    ends = []
    end = min(first, questions)
    while end < questions:
        ends.append(end)
        end *= 2
    return [*ends, questions]


def level_of(looks: int) -> float:
    """The level of each interval of a run that may look so many times."""
    return 1 - (1 - LEVEL) / looks


def verdict(share: Interval | None, keep: float) -> Verdict:
    """What an interval says of a share that is to be kept."""
    if share is None:
        return Verdict.UNDECIDED
    if share.low >= keep:
        return Verdict.KEPT
    return Verdict.LOST if share.high < keep else Verdict.UNDECIDED


def least_questions(keep: float, looks: int) -> int:
    """Right answers of `full` below which even a policy that keeps them all is not shown to."""
    level, count = level_of(looks), 1
    if keep == 1:
        raise ValueError("no number of answers shows that every answer is kept")
    while of_mean([1.0] * count, level).low < keep:
        count = math.ceil(count * 1.02)
    return count


def questions_of(keep: float, samples: int | None, first: int = FIRST) -> int:
    """How many questions are asked at most, where the first round asks `first`.

    Raises:
        ToolError: so few cannot show that a policy keeps the share.
    """
    if keep == 1:
        raise ToolError(
            "--keep 1: no number of answers shows that every answer is kept: use --keep 0.99"
        )
    most = samples or MOST
    while samples is None and most < 2 * least_questions(keep, len(rounds_of(most, first))):
        most *= 2
    least = least_questions(keep, len(rounds_of(most, first)))
    if most < least:
        raise ToolError(
            f"--samples {samples}: even a policy that keeps every answer is not shown to keep "
            f"{keep:.1%} by fewer than {least} right ones: use --samples {2 * least}, or a lower "
            "--keep"
        )
    return most
