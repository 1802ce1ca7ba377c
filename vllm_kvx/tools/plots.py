"""What the plots of several tools share; without matplotlib they say how to get it."""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError

BLUE, RED, GREEN, ORANGE = "#4878a8", "#b8504c", "#5a9a5a", "#d8923c"


def check_matplotlib(flag: str) -> None:
    """Raise ToolError if the plot that `flag` asks for cannot be drawn; before minutes of work."""
    if find_spec("matplotlib") is None:
        raise ToolError(f"{flag}: plots need matplotlib: pip install 'vllm-kvx[tools]'")


def draw(path: Path, figure_of: Callable[..., Any], *args: Any) -> str:
    """Draw `figure_of(pyplot, *args)` to `path`; says where it is, or how to get one.

    Raises:
        ToolError: `path` cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        return "No plot: it needs matplotlib; pip install 'vllm-kvx[tools]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = figure_of(pyplot, *args)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not have
        raise ToolError(f"the result is stored, but the plot {path} is not: {error}") from error
    finally:
        pyplot.close(figure)
    return f"Plot: {path}"


def number_of(record: Mapping[str, Any]) -> str:
    """`n = 4 prompts`, of a record's facts."""
    count = record["prompts"]["count"]
    return f"n = {count} prompt{'s' * (count != 1)}"


def say_if_empty(axis: Any, values: Sequence[float | None]) -> None:
    """Writes into a panel that has no value to show that it has none."""
    if not any(value is not None and math.isfinite(value) for value in values):
        axis.text(0.5, 0.5, "nothing was measured", transform=axis.transAxes, ha="center")


def numbers(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
