"""Confidence intervals of 95%: of a mean of scores, and of the ratio of two."""

import math
from collections.abc import Sequence
from typing import NamedTuple

_Z = 1.959964
_RESAMPLES = 2000


class Interval(NamedTuple):
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float


def of_mean(scores: Sequence[float]) -> Interval:
    """Wilson's interval of the mean of scores within 0 and 1.

    Scores between 0 and 1 vary less than the ones and zeros of the same mean, so for them it is
    wider than it needs to be. It stays an interval where all scores are 1.
    """
    count = len(scores)
    mean = math.fsum(scores) / count
    square = _Z * _Z / count
    middle = (mean + square / 2) / (1 + square)
    reach = _Z / (1 + square) * math.sqrt(mean * (1 - mean) / count + square / (4 * count))
    # Where all scores are alike an end is the mean itself, but for rounding.
    low, high = max(middle - reach, 0.0), min(middle + reach, 1.0)
    return Interval(mean, min(low, mean), max(high, mean))


def of_values(values: Sequence[float]) -> Interval:
    """The normal interval of the mean of any values; of a single one it has no width."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, mean, mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    reach = _Z * math.sqrt(variance / count)
    return Interval(mean, mean - reach, mean + reach)


def of_ratio(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """The ratio of sums, first to second, of scores of the same prompts; by paired bootstrap.

    None where the second are all 0: there is nothing to keep.
    """
    below = math.fsum(second for _, second in pairs)
    if below == 0:
        return None
    ratio = math.fsum(first for first, _ in pairs) / below
    import numpy as np

    values, count = np.array(pairs), len(pairs)
    # How often each pair is drawn, resample by resample.
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), _RESAMPLES)
    sums = draws @ values
    sums = sums[sums[:, 1] > 0]
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975]).tolist()
    if low == high:
        # Prompts that all agree resample to no width; a few of them prove little.
        kept = of_mean([min(first / second, 1.0) for first, second in pairs if second])
        low, high = min(low, kept.low), max(high, kept.high) if ratio < 1 else high
    return Interval(ratio, min(low, ratio), max(high, ratio))
