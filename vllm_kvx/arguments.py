"""What arguments of several commands may be."""

import argparse


def positive(text: str) -> int:
    """The argparse type of counts."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value
