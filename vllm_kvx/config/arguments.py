"""What arguments of several commands may be."""

import argparse
import math


def positive(text: str) -> int:
    """The argparse type of counts."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def seconds(text: str) -> float:
    """The argparse type of waits, in seconds."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds above 0, got {text}")
    return value
