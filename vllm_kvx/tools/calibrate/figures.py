"""The tools' figures; without matplotlib they say how to get one."""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError

_BLUE, _RED, _GREEN, _ORANGE = "#4878a8", "#b8504c", "#5a9a5a", "#d8923c"


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


def tsp_curve(pyplot: Any, record: Mapping[str, Any]) -> Any:
    """FastKV's Figure 3: the distance of Eq. 3 over the candidate layers."""
    mean, std = record["distances"]["mean"], record["distances"]["std"]
    layers, chosen = list(range(len(mean))), record["tsp_layer"]
    figure, axis = pyplot.subplots(figsize=(6, 3.5))
    axis.errorbar(layers, mean, yerr=std, color=_BLUE, marker="o", markersize=4, capsize=3)
    axis.plot(chosen, mean[chosen], "o", color="black", markersize=8, zorder=3)
    axis.axvline(chosen, color="gray", linewidth=0.8, linestyle=":")
    head = f"{Path(record['model']).name}: TSP layer {chosen}"
    bars = "; bars: standard deviation" if any(std) else ""
    axis.set_title(f"{head}\n{number_of(record)}{bars}", loc="left", fontsize=10)
    axis.set_xlabel(f"candidate TSP layer, of {record['layers']}")
    axis.set_ylabel("relative squared distance (Eq. 3)")
    top = axis.get_ylim()[1]
    axis.set_ylim(-0.03 * top, top)
    axis.locator_params(axis="x", integer=True)
    figure.tight_layout()
    return figure


def answer_curves(pyplot: Any, record: Mapping[str, Any]) -> Any:
    """What each layer would propagate of what answers need, and the paper's criterion beside it."""
    known = record["asked"] != "own"
    result = "tsp_layer" if record["method"] == "fastkv" else "pivot"
    chosen, paper = record[result], record["paper"]
    figure, axis = pyplot.subplots(figsize=(6.5, 4))
    for (name, values), color in zip(record["scores"].items(), (_BLUE, _GREEN), strict=False):
        axis.plot(values, color=color, marker="o", markersize=4, label=name)
    if chosen is not None:
        axis.axvline(chosen, color="black", linewidth=1, label=f"{result} {chosen}")
    if paper:
        axis.axvline(
            paper["layer"], color=_RED, linestyle=":", label=f"the paper's: {paper['layer']}"
        )
        other = axis.twinx()
        other.plot(_numbers(paper["values"]), color=_RED, linewidth=1, alpha=0.6)
        other.set_ylabel("Eq. 3" if record["method"] == "fastkv" else "Eq. 8", color=_RED)
    head = f"{Path(record['model']).name}: what a layer propagates"
    axis.set_title(f"{head}\n{number_of(record)}", loc="left", fontsize=10)
    axis.set_xlabel(f"layer, of {record['layers']}")
    axis.set_ylabel("share of the evidence" if known else "share of the answers' attention")
    axis.set_ylim(-0.02, 1.03)
    axis.set_xlim(-0.5, record["layers"] - 0.5)
    axis.legend(fontsize=8, loc="upper left")
    axis.locator_params(axis="x", integer=True)
    figure.tight_layout()
    return figure


def pivot_curves(pyplot: Any, record: Mapping[str, Any], online: int | None = None) -> Any:
    """StructKV's Figure 4: its metrics and the transition score by layer, and the pivot.

    record: `metrics`, `transition`, `pivot`, `layers`, `prompts` and `model`.
    online: the online rule's pivot, dashed.
    """
    curves = (
        ("entropy (nats)", record["metrics"]["entropy"], _BLUE),
        ("sparsity", record["metrics"]["sparsity"], _GREEN),
        ("variance", record["metrics"]["variance"], _ORANGE),
        ("transition score", record["transition"], _RED),
    )
    figure, axes = pyplot.subplots(4, figsize=(6.5, 8), sharex=True)
    pivot = record["pivot"]
    for axis, (label, values, color) in zip(axes, curves, strict=True):
        axis.plot(_numbers(values), color=color, marker="o", markersize=4)
        say_if_empty(axis, values)
        axis.axvspan(-0.5, pivot, color="gray", alpha=0.12, linewidth=0)
        axis.axvline(pivot, color="black", linewidth=1, label=f"pivot {pivot}")
        if online is not None:
            axis.axvline(
                online, color="black", linewidth=1, linestyle="--", label=f"online {online}"
            )
        axis.set_ylabel(label)
        axis.ticklabel_format(axis="y", scilimits=(-3, 4))
        axis.set_xlim(-0.5, record["layers"] - 0.5)
    # Below the pivot attention still settles: the paper's unstable region, in gray.
    head = f"{Path(record['model']).name}: pivot {pivot}"
    axes[0].set_title(f"{head}\n{number_of(record)}", loc="left", fontsize=10)
    if online is not None:
        axes[0].legend(fontsize=8)
    axes[-1].set_xlabel(f"layer, of {record['layers']}")
    axes[-1].locator_params(axis="x", integer=True)
    figure.align_ylabels(axes)
    figure.tight_layout()
    return figure


def recovery_curves(pyplot: Any, record: Mapping[str, Any], labels: Mapping[str, str]) -> Any:
    """StructKV's Figure 5: attention mass recovery by layer; a line for each of `labels`."""
    figure, axis = pyplot.subplots(figsize=(6.5, 4))
    for (method, label), color in zip(labels.items(), (_RED, _BLUE, _GREEN, _ORANGE), strict=True):
        means = record["recovery"][method]["mean"]
        # StructKV's on top: up to the pivot FastKV's is the same.
        order = 3 if method == "structkv" else 2
        axis.plot(means, color=color, marker="o", markersize=4, label=label, zorder=order)
    axis.axvline(record["pivot"], color="gray", linewidth=0.8, linestyle=":")
    head = f"{Path(record['model']).name}: after layer {record['pivot']}"
    axis.set_title(f"{head}\n{number_of(record)}", loc="left", fontsize=10)
    axis.set_xlabel(f"layer, of {record['layers']}")
    axis.set_ylabel("attention mass recovered")
    axis.set_ylim(0, 1.03)
    axis.legend(fontsize=8, loc="lower left")
    axis.locator_params(axis="x", integer=True)
    figure.tight_layout()
    return figure


def access_curves(pyplot: Any, record: Mapping[str, Any]) -> Any:
    """SPEED's Figure 3: attention to the prompt, its entropy downwards, and straightening.

    A line for each of the record's groups but `all`; in the first panel dotted and dashed what the
    first token and earlier generated tokens get, over all prompts.
    """
    groups, layers = record["groups"], range(1, record["layers"] + 1)
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6))
    panels = (
        ("user", "attention to the user's prompt"),
        ("normalised", "prompt entropy / log |U|, inverted"),
        ("straightening", "straightening (degrees)"),
    )
    named = [(name, group) for name, group in groups.items() if name != "all"]
    for axis, (curve, label) in zip(axes, panels, strict=True):
        for (name, group), color in zip(named, (_BLUE, _GREEN), strict=False):
            axis.plot(
                layers,
                group["curves"][curve],
                color=color,
                marker="o",
                markersize=3,
                label=f"{name}, n = {group['prompts']}",
            )
        say_if_empty(axis, [value for _, group in named for value in group["curves"][curve]])
        axis.set_ylabel(label)
        axis.set_xlabel(f"layer from 1, of {record['layers']}")
        axis.locator_params(axis="x", integer=True)
    axes[2].legend(fontsize=8)
    others = []
    for curve, label, style in (("first", "to the first", ":"), ("earlier", "to generated", "--")):
        others += axes[0].plot(
            layers, groups["all"]["curves"][curve], style, color="gray", linewidth=1, label=label
        )
    axes[0].legend(handles=others, fontsize=8)
    axes[1].invert_yaxis()
    axes[0].set_title(Path(record["model"]).name, loc="left")
    figure.tight_layout()
    return figure


def cutoff_curves(pyplot: Any, record: Mapping[str, Any]) -> Any:
    """What every speed-K changes of the full-depth answers, and the K of the paper's rule."""
    cut, cutoffs = record["groups"]["all"]["cut"], record["cutoffs"]
    figure, axis = pyplot.subplots(figsize=(6.5, 4))
    axis.plot(cutoffs, cut["same"], color=_BLUE, marker="o", markersize=4)
    axis.set_ylabel("share of greedy tokens that stay", color=_BLUE)
    axis.set_ylim(-0.02, 1.03)
    other = axis.twinx()
    other.plot(cutoffs, cut["kl"], color=_RED, marker="o", markersize=3, linewidth=1)
    other.set_ylabel("KL(full || cut), nats per token", color=_RED)
    other.set_ylim(bottom=0)
    if limits := record["groups"]["all"]["suggested"]["range"]:
        axis.axvspan(
            limits[0] - 0.5, limits[1] + 0.5, color="gray", alpha=0.15, label="the paper's rule"
        )
        axis.legend(fontsize=8, loc="center right")
    answers = record["samples"]
    tokens = sum(len(sample["answer"]) for sample in answers)
    head = f"{Path(record['model']).name}: speed-K without tuning"
    axis.set_title(
        f"{head}\nn = {len(answers)} answers of {tokens} tokens", loc="left", fontsize=10
    )
    axis.set_xlabel(f"K, of {record['layers']} layers")
    axis.locator_params(axis="x", integer=True)
    figure.tight_layout()
    return figure


def say_if_empty(axis: Any, values: Sequence[float | None]) -> None:
    """Writes into a panel that has no value to show that it has none."""
    if not any(value is not None and math.isfinite(value) for value in values):
        axis.text(0.5, 0.5, "nothing was measured", transform=axis.transAxes, ha="center")


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
