"""Variables of the environment that are switches."""

import os

# Whether the last layer that sees a whole prompt is split: see ``worker/split_layers``.
INNER_CUTS = "KVX_INNER_CUTS"
# Whether prompts run the stock decoder's own compiled pieces: see ``models/pieces``.
STOCK_PIECES = "KVX_STOCK_PIECES"

_OFF = ("", "0", "false", "no", "off")


def is_on(variable: str) -> bool:
    """Whether `variable` is set, to anything but 0, false, no or off, in any case."""
    return os.environ.get(variable, "").strip().lower() not in _OFF


def is_off(variable: str) -> bool:
    """Whether `variable`, which is on by itself, is set to 0, false, no, off or nothing."""
    return variable in os.environ and not is_on(variable)
