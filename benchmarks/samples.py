"""What is said of the samples of one measurement."""

import math
import statistics
from typing import Any


def summary(samples: list[float]) -> dict[str, Any]:
    """Samples in ms, their median, and their spread (max - min) / median."""
    median = statistics.median(samples)
    spread = (max(samples) - min(samples)) / median if median else 0.0
    return {
        "samples": [round(sample, 4) for sample in samples],
        "median": round(median, 4),
        "spread": round(spread, 4),
    }


def percentile(samples: list[float], percent: float) -> float:
    """The smallest sample that is not below `percent` of all samples."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
