"""The plots of `vllm-kvx calibrate`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kvx.tools.plots import BLUE, GREEN, ORANGE, RED, number_of, numbers, say_if_empty


def tsp_curve(pyplot: Any, record: Mapping[str, Any]) -> Any:
    """FastKV's Figure 3: the distance of Eq. 3 over the candidate layers."""
    mean, std = record["distances"]["mean"], record["distances"]["std"]
    layers, chosen = list(range(len(mean))), record["tsp_layer"]
    figure, axis = pyplot.subplots(figsize=(6, 3.5))
    axis.errorbar(layers, mean, yerr=std, color=BLUE, marker="o", markersize=4, capsize=3)
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
    rate = record["tsp_rate" if record["method"] == "fastkv" else "struct_rate"]
    scores = record["scores"][str(rate)]
    for (name, values), color in zip(scores.items(), (BLUE, GREEN), strict=False):
        axis.plot(values, color=color, marker="o", markersize=4, label=name)
    if chosen is not None:
        axis.axvline(chosen, color="black", linewidth=1, label=f"{result} {chosen}")
    if paper:
        axis.axvline(
            paper["layer"], color=RED, linestyle=":", label=f"the paper's: {paper['layer']}"
        )
        other = axis.twinx()
        other.plot(numbers(paper["values"]), color=RED, linewidth=1, alpha=0.6)
        other.set_ylabel("Eq. 3" if record["method"] == "fastkv" else "Eq. 8", color=RED)
    head = f"{Path(record['model']).name}: what a layer propagates at a rate of {rate}"
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
        ("entropy (nats)", record["metrics"]["entropy"], BLUE),
        ("sparsity", record["metrics"]["sparsity"], GREEN),
        ("variance", record["metrics"]["variance"], ORANGE),
        ("transition score", record["transition"], RED),
    )
    figure, axes = pyplot.subplots(4, figsize=(6.5, 8), sharex=True)
    pivot = record["pivot"]
    for axis, (label, values, color) in zip(axes, curves, strict=True):
        axis.plot(numbers(values), color=color, marker="o", markersize=4)
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
