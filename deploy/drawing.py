"""Draws the dashboard's panels by matplotlib, where they stand in Grafana."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.gridspec import GridSpec

from deploy import dashboard
from deploy.dashboard import Query, Series

COLUMNS = 24
BACKGROUND, PANEL, TEXT = "#111217", "#181b1f", "#ccccdc"


def draw(
    board: Mapping[str, Any], answers: Sequence[tuple[Query, list[Series]]], path: Path
) -> None:
    """Draws what was answered for each panel of `board` into `path`."""
    rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in dashboard.panels(board))
    style = {
        "text.color": TEXT,
        "axes.labelcolor": TEXT,
        "xtick.color": TEXT,
        "ytick.color": TEXT,
        "axes.edgecolor": "#33353b",
        "font.size": 7,
    }
    with pyplot.rc_context(style):
        figure = pyplot.figure(figsize=(20, rows * 0.36), facecolor=BACKGROUND)
        grid = GridSpec(
            rows,
            COLUMNS,
            figure,
            left=0.035,
            right=0.995,
            top=0.985,
            bottom=0.02,
            wspace=2.6,
            hspace=1.2,
        )
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = grid[at["y"] : at["y"] + at["h"], at["x"] : at["x"] + at["w"]]
            axes = figure.add_subplot(cells, facecolor=PANEL)
            if panel["type"] == "row":
                axes.set_facecolor(BACKGROUND)
                axes.axis("off")
                axes.text(0, 0.2, panel["title"], fontsize=11, weight="bold")
                continue
            axes.tick_params(labelsize=6)
            axes.set_title(panel["title"], loc="left", fontsize=8)
            mine = [(q, found) for q, found in answers if q.panel == panel["title"]]
            {"stat": _stat, "table": _table}.get(panel["type"], _lines)(axes, panel, mine)
        figure.savefig(path, dpi=80, facecolor=BACKGROUND)
        pyplot.close(figure)


def _named(mine: list[tuple[Query, list[Series]]]) -> list[tuple[str, Series]]:
    return [
        (dashboard.name_of(series, query.legend), series)
        for query, found in mine
        for series in found
    ]


def _stat(axes: Axes, panel: Mapping[str, Any], mine: list[tuple[Query, list[Series]]]) -> None:
    axes.axis("off")
    named = _named(mine)
    for i, (name, series) in enumerate(named):
        value = next((v for v in reversed(series.values) if v == v), math.nan)
        at = 0.5 - (i - (len(named) - 1) / 2) * 0.3
        axes.text(
            0.5, at, _value(value, panel), fontsize=20, ha="center", va="center", color="#73bf69"
        )
        axes.text(0.5, at - 0.28, name, fontsize=7, ha="center", va="center")


def _lines(axes: Axes, panel: Mapping[str, Any], mine: list[tuple[Query, list[Series]]]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    named = _named(mine)
    if defaults["custom"]["stacking"]["mode"] == "normal" and named:
        times = sorted({at for _, series in named for at in series.times})
        tables = [dict(zip(series.times, series.values, strict=True)) for _, series in named]
        stacks = [[table.get(at, 0.0) for at in times] for table in tables]
        clock = [at - times[0] for at in times]
        axes.stackplot(clock, stacks, labels=[name for name, _ in named], alpha=0.6)
    else:
        start = min((series.times[0] for _, series in named), default=0.0)
        for name, series in named:
            axes.plot([at - start for at in series.times], series.values, label=name, linewidth=1.2)
    if "min" in defaults:
        axes.set_ylim(bottom=defaults["min"])
    if "max" in defaults:
        axes.set_ylim(top=defaults["max"] * 1.05)
    axes.yaxis.set_major_formatter(lambda value, _: _value(value, panel))
    axes.set_xlabel("s", fontsize=6)
    axes.grid(color="#2c2e33", linewidth=0.5)
    if named:
        axes.legend(fontsize=6, ncols=2, facecolor=PANEL, edgecolor="none", labelcolor=TEXT)


def _table(axes: Axes, panel: Mapping[str, Any], mine: list[tuple[Query, list[Series]]]) -> None:
    axes.axis("off")
    hidden = panel["transformations"][0]["options"]["excludeByName"]
    for i, (_, series) in enumerate(_named(mine)):
        shown = {k: v for k, v in series.labels.items() if k not in hidden}
        text = json.dumps(shown).strip("{}").replace('"', "")
        axes.text(0, 0.92 - i * 0.12, text[:95], fontsize=6, va="top")


def _value(value: float, panel: Mapping[str, Any]) -> str:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if value != value:
        return "no data"
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        return f"{value:.3g} s"
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return number + (" req/s" if unit == "reqps" else "")
