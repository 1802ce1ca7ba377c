"""The plots of `benchmarks.report`: one message each, in a size that stays readable at half width.

A plot's file carries the digest of the figures that it shows, so that `--check` needs no drawing.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.names import STOCK
from benchmarks.report.cells import order
from benchmarks.report.files import Figure, Kept, Load, most_asked, newest, same_method
from benchmarks.report.tables import answered
from benchmarks.serving.figures import figures

_BLUE, _GRAY, _RED = "#4878a8", "#b8b8b8", "#b8504c"
_MARKS = "osD^vPX*"
# To be raised when the drawing changes: what is there is then drawn again.
_STYLE = 2


@dataclass(frozen=True)
class Plot:
    """What one plot shows.

    kind: bars, curves, intervals or dots. rows: name, value and what else the kind needs.
    """

    name: str
    title: str
    kind: str
    axis: str
    other_axis: str
    rows: tuple[tuple[Any, ...], ...]

    @property
    def digest(self) -> str:
        content = [_STYLE, self.name, self.title, self.kind, self.axis, self.other_axis, self.rows]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def plots(where: str, found: Sequence[Figure], loads: Sequence[Load]) -> list[Plot]:
    """The plots of one machine and model; `where` names both in titles."""
    slug = "".join(c if c.isalnum() else "-" for c in where.lower()).strip("-")
    while "--" in slug:
        slug = slug.replace("--", "-")
    wanted = [
        ("ttft:130000", "Time to first token, 130,000 tokens", "gain over stock vLLM (times)"),
        ("tpot:130000", "Time per output token, 130,000 tokens", "gain over stock vLLM (times)"),
        (
            "pool_decode:128000",
            "Tokens per second, pool full of 128,000-token prompts",
            "gain over stock vLLM (times)",
        ),
    ]
    result = []
    for case, title, axis in wanted:
        young = newest([each for each in found if each.case == case])
        rows = tuple(
            (name, round(young[name, case].ratio, 4), _rounded(young[name, case].ideal))
            for name in order(name for name, _ in young)
        )
        # The largest gain first.
        rows = tuple(sorted(rows, key=lambda row: -row[1]))
        if rows:
            name = f"{case.partition(':')[0].replace('_', '-')}-{slug}"
            result.append(Plot(name, f"{title}\n{where}", "bars", axis, "", rows))
    return result + _load_plots(slug, where, loads)


def answers(found: Sequence[Figure], loads: Sequence[Load], kept: Sequence[Kept]) -> list[Plot]:
    """What the policies above keep of a model's answers."""
    rows = _kept_rows(found, loads, kept)
    title = "Right answers kept, with 95% intervals"
    axis = "of full's right answers (%)"
    return [Plot("answers", title, "intervals", axis, "", rows)] if rows else []


def _rounded(ideal: float | None) -> float | None:
    return None if ideal is None else round(ideal, 4)


def _load_plots(slug: str, where: str, loads: Sequence[Load]) -> list[Plot]:
    """By lengths: throughput of the GPU against a user's, and waits over the rates of requests."""
    result = []
    # A server looks the same in all plots of a machine.
    looks = {name: place for place, name in enumerate(order(load.server for load in loads))}
    for lengths in dict.fromkeys(load.setting.lengths for load in loads):
        here = [load for load in loads if load.setting.lengths == lengths]
        of_users = [load for load in here if load.setting.rate is None]
        of_rates = [load for load in here if load.setting.rate is not None]
        name = f"{lengths.lower().replace('/', '-')}-{slug}"
        title = f"Tokens in/out {lengths}: further right and up is better\n{where}"
        axes = ("tokens/s of one user (1 / mean TPOT)", "output tokens/s of the GPU")
        points = _points(of_users, "user_tokens_per_s", "output_tokens_per_s", looks)
        result.append(Plot(f"load-{name}", title, "curves", *axes, points))
        title = f"Tokens in/out {lengths}: what running requests wait\n{where}"
        axes = ("requests/s offered, Poisson", "p99 time between two tokens (ms)")
        # One rate is no curve: the tables have it.
        points = _points(of_rates, None, "p99_itl", looks)
        points = tuple(row for row in points if len(row[1]) > 1)
        result.append(Plot(f"waits-{name}", title, "curves", *axes, points))
    return [plot for plot in result if plot.rows]


def _points(
    loads: Sequence[Load], x: str | None, y: str, looks: Mapping[str, int]
) -> tuple[tuple[Any, ...], ...]:
    """Every server's points, by figures x and y, and its look; x None is the rate of requests."""
    rows = []
    for server in order(load.server for load in loads):
        both = [
            (
                load.setting.rate if x is None else figures(load.measured)[x],
                figures(load.measured)[y],
            )
            for load in loads
            if load.server == server
        ]
        known = sorted((a, b) for a, b in both if a is not None and b is not None)
        if known:
            points = [[round(a, 3), round(b, 3)] for a, b in known]
            rows.append((server, points, looks[server]))
    return tuple(rows)


def _kept_rows(
    found: Sequence[Figure], loads: Sequence[Load], kept: Sequence[Kept]
) -> tuple[tuple[Any, ...], ...]:
    """By policy that was measured above: what it kept where most questions were asked."""
    names = answered(found, loads)
    return tuple(
        (f"{each.policy}\n{each.model}, n {each.n}", *(round(100 * x, 2) for x in each.of_full))
        for each in most_asked(kept)
        if same_method(each.policy) in names
    )


def draw(plot: Plot, folder: Path) -> None:
    """Writes the plot's PNG.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 12}):
        height = 1.8 + 0.6 * len(plot.rows) if plot.kind not in ("curves", "dots") else 5
        figure, axis = pyplot.subplots(figsize=(7, max(3.0, height)), layout="constrained")
        _KINDS[plot.kind](axis, plot.rows)
        axis.set_title(plot.title, loc="left", fontsize=13)
        axis.set_xlabel(plot.axis)
        if plot.other_axis:
            axis.set_ylabel(plot.other_axis)
        if len(axis.get_legend_handles_labels()[0]) > 1:
            figure.legend(loc="outside lower center", ncols=2, fontsize=11)
        metadata = {"Software": "benchmarks.report", "Description": plot.digest}
        figure.savefig(folder / f"{plot.name}.png", dpi=130, metadata=metadata)
        pyplot.close(figure)


def _bars(axis: Any, rows: Sequence[tuple[Any, ...]]) -> None:
    """Measured gains, and beneath each its ideal as a bar of its own."""
    for place, (_, ratio, ideal) in enumerate(rows):
        label = {"label": "measured"} if not place else {}
        axis.barh(place - 0.18, ratio, 0.36, color=_BLUE, **label)
        axis.text(ratio, place - 0.18, f" {ratio:.2f}", va="center", fontsize=11)
        if ideal is not None:
            axis.barh(place + 0.2, ideal, 0.24, color=_GRAY)
    axis.barh(0, 0, 0, color=_GRAY, label="ideal")
    axis.set_yticks(range(len(rows)), [_wrapped(row[0]) for row in rows])
    axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axis.invert_yaxis()
    axis.margins(x=0.12)


def _wrapped(name: str) -> str:
    """A long name on several lines."""
    return name.replace(",granularity", ",\ngranularity").replace("+", "+\n").replace("@", "\n@")


def _curves(axis: Any, rows: Sequence[tuple[Any, ...]]) -> None:
    for server, points, look in rows:
        mark = {"marker": _MARKS[look % len(_MARKS)], "markersize": 8, "linewidth": 1.5}
        mark["color"] = "black" if server == STOCK else f"C{look % 10}"
        axis.plot(*zip(*points, strict=True), label=server, **mark)
    every = [point for _, points, _ in rows for point in points]
    axis.set_xlim(0, 1.08 * max(x for x, _ in every))
    axis.set_ylim(0, 1.08 * max(y for _, y in every))


def _intervals(axis: Any, rows: Sequence[tuple[Any, ...]]) -> None:
    for place, (_, middle, low, high) in enumerate(rows):
        ends = [[middle - low], [high - middle]]
        axis.errorbar(middle, place, xerr=ends, fmt="o", color=_BLUE, capsize=4, markersize=8)
    axis.set_yticks(range(len(rows)), [_wrapped(row[0]) for row in rows], fontsize=11)
    axis.axvline(100, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlim(left=0)
    axis.set_ylim(len(rows) - 0.5, -0.5)


def _dots(axis: Any, rows: Sequence[tuple[Any, ...]]) -> None:
    """A dot for each row of name, x, y and the interval of y; stock is at 1 and 100."""
    axis.plot(1, 100, "o", color="black", markersize=8)
    axis.annotate("stock", (1, 100), (-10, -18), textcoords="offset points", fontsize=11)
    for place, (name, x, middle, low, high) in enumerate(rows):
        ends = [[middle - low], [high - middle]]
        axis.errorbar(x, middle, yerr=ends, fmt="o", color=f"C{place}", capsize=4, markersize=9)
        axis.annotate(name, (x, middle), (10, -4), textcoords="offset points", fontsize=11)
    axis.axhline(100, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlim(0.8, 1.3 * max(row[1] for row in rows))
    axis.set_ylim(0, 1.08 * max(100, *(row[4] for row in rows)))


_KINDS = {"bars": _bars, "curves": _curves, "intervals": _intervals, "dots": _dots}


def is_drawn(plot: Plot, folder: Path) -> bool:
    """Whether the folder's PNG shows just these figures."""
    path = folder / f"{plot.name}.png"
    return path.exists() and plot.digest.encode() in path.read_bytes()
