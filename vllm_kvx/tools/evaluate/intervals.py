"""Confidence intervals: of a mean of scores, of two policies' scores, of a recovery.

They are of 95% where no other level is given.
"""

import math
from collections.abc import Hashable, Sequence
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

LEVEL = 0.95
_Z = 1.959964
_RESAMPLES = 2000
# Prompts on which two scores differ, below which a sign test cannot reach 5%.
LEAST_DIFFERENT = 6


class Interval(NamedTuple):
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float


def of_mean(scores: Sequence[float], level: float = LEVEL) -> Interval:
    """Wilson's interval of the mean of scores within 0 and 1.

    Scores between 0 and 1 vary less than the ones and zeros of the same mean, so for them it is
    wider than it needs to be. It stays an interval where all scores are 1.
    """
    count = len(scores)
    mean = math.fsum(scores) / count
    z = _z(level)
    square = z * z / count
    middle = (mean + square / 2) / (1 + square)
    reach = z / (1 + square) * math.sqrt(mean * (1 - mean) / count + square / (4 * count))
    # Where all scores are alike an end is the mean itself, but for rounding.
    low, high = max(middle - reach, 0.0), min(middle + reach, 1.0)
    return Interval(mean, min(low, mean), max(high, mean))


@cache
def least_right() -> int:
    """Answers that `full` must have right for a policy's share of them to say anything.

    With fewer, the interval of a policy that keeps all of them and that of one that keeps none
    overlap.
    """
    count = 1
    while of_mean([1.0] * count).low <= of_mean([0.0] * count).high:
        count += 1
    return count


def of_values(values: Sequence[float]) -> Interval:
    """The normal interval of the mean of any values; of a single one it has no width."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, mean, mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    reach = _Z * math.sqrt(variance / count)
    return Interval(mean, mean - reach, mean + reach)


def of_ratio(pairs: Sequence[tuple[float, float]], level: float = LEVEL) -> Interval | None:
    """The ratio of sums, first to second, of scores of the same prompts; by paired bootstrap.

    None where the second are all 0: there is nothing to keep.
    """
    below = math.fsum(second for _, second in pairs)
    if below == 0:
        return None
    ratio = math.fsum(first for first, _ in pairs) / below
    sums = _resampled(pairs, level)
    sums = sums[sums[:, 1] > 0]
    low, high = _middle(sums[:, 0] / sums[:, 1], level)
    if low == high:
        # Prompts that all agree resample to no width; a few of them prove little.
        kept = of_mean([min(first / second, 1.0) for first, second in pairs if second], level)
        low, high = min(low, kept.low), max(high, kept.high) if ratio < 1 else high
    return Interval(ratio, min(low, ratio), max(high, ratio))


def of_kept(pairs: Sequence[tuple[float, float]], level: float = LEVEL) -> Interval | None:
    """The share of `full`'s right answers that a policy kept.

    pairs: (the policy's score, full's score) of the same prompts, each within 0 and 1.

    The ends are the wider ones of a paired bootstrap over prompts and of Wilson's interval over
    those that `full` has right: of few losses a bootstrap is too narrow, and Wilson's does not see
    what a policy has right alone. None where `full` has nothing right.
    """
    found = of_ratio(pairs, level)
    if found is None:
        return None
    kept = of_mean([min(own / full, 1.0) for own, full in pairs if full], level)
    high = max(found.high, kept.high) if found.value < 1 else found.high
    return Interval(found.value, min(found.low, kept.low), high)


def of_difference(
    pairs: Sequence[tuple[float, float]], texts: Sequence[Hashable] | None = None
) -> Interval:
    """The mean of first less second, of scores within 0 and 1 of the same prompts; bootstrapped.

    Prompts are drawn again with both of their scores, so what makes a prompt hard for both is in no
    difference.

    texts: what each prompt asks about; prompts over the same text are drawn together. None where
        each has its own.
    """
    totals: dict[Hashable, list[float]] = {}
    for text, (first, second) in zip(texts or range(len(pairs)), pairs, strict=True):
        total = totals.setdefault(text, [0.0, 0.0])
        total[0] += first - second
        total[1] += 1
    value = math.fsum(first - second for first, second in pairs) / len(pairs)
    sums = _resampled(list(totals.values()))
    low, high = _middle(sums[:, 0] / sums[:, 1])
    if low == high:
        # Prompts that all agree resample to no width: as many others may differ as none of these.
        unseen = of_mean([0.0] * len(totals)).high
        low, high = max(value - unseen, -1.0), min(value + unseen, 1.0)
    return Interval(value, min(low, value), max(high, value))


def of_recovery(triples: Sequence[tuple[float, float, float]]) -> Interval | None:
    """The share of a loss that comes back, (tuned - cut) / (full - cut); by paired bootstrap.

    triples: (full, cut, tuned), scores of the same prompts.

    None where `cut` loses nothing significant against `full`: the loss is not above 0 in 97.5% of
    the resamples, or they differ on fewer than LEAST_DIFFERENT prompts.
    """
    pairs = [(tuned - cut, full - cut) for full, cut, tuned in triples]
    shares = [gained / lost for gained, lost in pairs if lost]
    if len(shares) < LEAST_DIFFERENT:
        return None
    sums = _resampled(pairs)
    if _middle(sums[:, 1])[0] <= 0:
        return None
    value = math.fsum(gained for gained, _ in pairs) / math.fsum(lost for _, lost in pairs)
    sums = sums[sums[:, 1] > 0]
    low, high = _middle(sums[:, 0] / sums[:, 1])
    if low == high:
        # As above: of prompts that all agree.
        alike = of_mean([min(max(share, 0.0), 1.0) for share in shares])
        low, high = min(low, alike.low), max(high, alike.high) if value < 1 else high
    return Interval(value, min(low, value), max(high, value))


def _z(level: float) -> float:
    """Standard deviations of a normal distribution within which `level` of it lies."""
    return _Z if level == LEVEL else NormalDist().inv_cdf((1 + level) / 2)


def _resampled(rows: Sequence[Sequence[float]], level: float = LEVEL) -> Any:
    """Sums (R, C) of rows of C numbers that are drawn again, as many as there are.

    R is _RESAMPLES, and more for a higher level, so that as many resamples lie outside.
    """
    import numpy as np

    count = len(rows)
    # How often each row is drawn, resample by resample.
    times = round(_RESAMPLES * (1 - LEVEL) / (1 - level))
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), times)
    return draws @ np.array(rows)


def _middle(values: Any, level: float = LEVEL) -> tuple[float, float]:
    """What `level` of the values lie between."""
    import numpy as np

    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return low, high
