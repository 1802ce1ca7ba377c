"""The plots of `vllm-kvx diagnose`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kvx.tools.plots import BLUE, GREEN, ORANGE, RED, number_of, say_if_empty


def recovery_curves(pyplot: Any, record: Mapping[str, Any], labels: Mapping[str, str]) -> Any:
    """StructKV's Figure 5: attention mass recovery by layer; a line for each of `labels`."""
    figure, axis = pyplot.subplots(figsize=(6.5, 4))
    for (method, label), color in zip(labels.items(), (RED, BLUE, GREEN, ORANGE), strict=True):
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
        for (name, group), color in zip(named, (BLUE, GREEN), strict=False):
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
    axis.plot(cutoffs, cut["same"], color=BLUE, marker="o", markersize=4)
    axis.set_ylabel("share of greedy tokens that stay", color=BLUE)
    axis.set_ylim(-0.02, 1.03)
    other = axis.twinx()
    other.plot(cutoffs, cut["kl"], color=RED, marker="o", markersize=3, linewidth=1)
    other.set_ylabel("KL(full || cut), nats per token", color=RED)
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
