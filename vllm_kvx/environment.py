"""Variables of the environment that are switches."""

import os

# Whether the last layer that sees a whole prompt is split: see ``worker/splits``.
INNER_CUTS = "KVX_INNER_CUTS"

_OFF = ("", "0", "false", "no", "off")


def is_on(variable: str) -> bool:
    """Whether `variable` is set, to anything but 0, false, no or off, in any case."""
    return os.environ.get(variable, "").strip().lower() not in _OFF
