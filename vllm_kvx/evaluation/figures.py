"""Plots of a run: accuracy against what is kept and read, and against speed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kvx.calibration.figures import draw
from vllm_kvx.errors import ToolError
from vllm_kvx.evaluation.rows import FULL, is_of_original, policy_of, row_of_original
from vllm_kvx.evaluation.summary import Summary

# More than these are told apart by nobody.
_MOST_CURVES = 12


def draw_all(
    directory: Path, summary: Summary, model: str, speed: Mapping[str, Mapping[str, float]] | None
) -> str:
    """Draws what there are answers for; a line on each plot."""
    if not summary.scored:
        return "No plot: no task is answered right or wrong."
    title = Path(model).name
    said = [draw(directory / "kept.png", kept_curves, summary, title)]
    if speed is not None:
        said.append(draw(directory / "speed.png", speed_points, summary, title, speed))
    return "\n".join(said)


def kept_curves(pyplot: Any, summary: Summary, title: str) -> Any:
    """Right answers over the share of entries kept, and over the share that is read; by method."""
    lengths: list[int | None] = [*summary.lengths] or [None]
    figure, axes = pyplot.subplots(
        2, len(lengths), figsize=(4.2 * len(lengths), 7), sharey=True, squeeze=False
    )
    families: dict[str, list[str]] = {}
    for policy in summary.policies:
        if policy_of(policy) != FULL:
            families.setdefault(family_of(policy), []).append(policy)
    if len(families) > _MOST_CURVES:
        # Points without a curve make a thicket; the table has them.
        families = {name: members for name, members in families.items() if len(members) > 1}
    colors, lines = pyplot.get_cmap("tab10"), {}
    for column, length in enumerate(lengths):
        full = summary.cell(summary.yardstick, length=length)
        for row, what in enumerate(("kept", "read")):
            axis = axes[row][column]
            for number, (family, members) in enumerate(families.items()):
                cells = [c for p in members if (c := summary.cell(p, length=length)) is not None]
                points = sorted((100 * getattr(c, what), c.score) for c in cells)
                if not points:
                    continue
                xs, scores = [x for x, _ in points], [s for _, s in points]
                errors = [
                    [100 * (s.value - s.low) for s in scores],
                    [100 * (s.high - s.value) for s in scores],
                ]
                lines[family] = axis.errorbar(
                    xs,
                    [100 * s.value for s in scores],
                    yerr=errors,
                    color=colors(number % 10),
                    marker="osD^v"[number // 10 % 5],
                    markersize=4,
                    linewidth=1,
                    elinewidth=0.5,
                    label=family,
                )
            if full is not None:
                axis.axhline(100 * full.score.value, color="black", linewidth=0.8, linestyle=":")
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter("")
            axis.set_xticks([5, 10, 20, 40, 100], ["5", "10", "20", "40", "100"])
            axis.set_xlabel(f"share of KV entries {what} (%)")
            if row == 0 and length is not None:
                axis.set_title(f"{length:,} tokens", loc="left", fontsize=10)
            if column == 0:
                axis.set_ylabel("right answers (%)")
    axes[0][-1].legend(
        lines.values(), lines, fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0)
    )
    head = f"{title}; dotted: {summary.yardstick}; bars: 95% confidence"
    figure.suptitle(head, x=0.02, ha="left", fontsize=11)
    figure.tight_layout()
    return figure


def speed_points(
    pyplot: Any, summary: Summary, title: str, speed: Mapping[str, Mapping[str, float]]
) -> Any:
    """Right answers over the gain in TTFT and in decoded tokens/s, a point for each policy."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, (what, label) in zip(
        axes,
        (("ttft", "TTFT, stock over policy"), ("tokens", "tokens/s, policy over stock")),
        strict=True,
    ):
        for policy in summary.policies:
            # Weights of one shape are as fast, tuned or not.
            name = policy_of(policy)
            stock = f"stock{name.removeprefix(FULL)}" if name.startswith(f"{FULL}@") else name
            gain = 1.0 if name == FULL else speed.get(stock, {}).get(what)
            cell = summary.cell(policy)
            if gain is None or cell is None:
                continue
            axis.plot(gain, 100 * cell.score.value, "o", markersize=5)
            axis.annotate(policy, (gain, 100 * cell.score.value), fontsize=7)
        axis.set_xlabel(label)
    axes[0].set_ylabel("right answers (%)")
    figure.suptitle(title, x=0.02, ha="left", fontsize=11)
    figure.tight_layout()
    return figure


def read_speed(path: str) -> dict[str, dict[str, float]]:
    """By policy, the best gain over stock in TTFT and in decoded tokens/s, of a file of
    benchmarks.compare.

    Raises:
        ToolError: it is no such file.
    """
    try:
        engines = json.loads(Path(path).read_text(encoding="utf-8"))["engines"]
        found: dict[str, dict[str, float]] = {}
        for policy, engine in engines.items():
            for case, result in engine["cases"].items():
                if "@" in case:
                    continue  # Of another policy on this engine.
                ratio = result.get("ratio_to_stock")
                what = {"ttft": "ttft", "decode": "tokens"}.get(case.split(":")[0].split("_")[0])
                if ratio and what:
                    best = found.setdefault(policy, {})
                    best[what] = max(best.get(what, 0.0), ratio)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ToolError(f"{path} is no result of benchmarks.compare: {error}") from error


def family_of(policy: str) -> str:
    """What policies that differ in their rate or budget alone have in common, for a legend."""
    plain, at, dtype = policy_of(policy).partition("@")
    parts = []
    for part in plain.split("+"):
        name, _, rest = part.partition(":")
        head, dash, number = name.rpartition("-")
        if dash and number.isdigit():
            name = head
        keys = ("kv_rate=", "kv_budget=", "rate=", "dense_below=", "recent=")
        shown = [p for p in rest.split(",") if p and not p.startswith(keys)]
        parts.append(f"{name}:{','.join(shown)}" if shown else name)
    family = "+".join(parts) + at + dtype
    return row_of_original(family) if is_of_original(policy) else family
