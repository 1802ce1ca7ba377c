"""Draws results of `benchmarks.answers.recall --model`: what each reduction over query heads finds.

`python -m benchmarks.answers.recall_plot NAME.json ... [--out NAME.png]`: a column for each file,
lines over budgets, a panel for each metric. FIER with groups of 32, Quest with pages of 16.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common.files import read_json

PANELS = {"mass": "attention found, %", "right": "lookups right, %", "loss": "loss, nats"}
COLORS = {"max": "#4878a8", "sum": "#d1802f", "softmax": "#3a923a", "softmax/2": "#c03d3e"}
DASHES = {("fier", 32): "-", ("quest", 16): ":", ("exact", 1): (0, (1, 3))}


def draw(axis: Any, rows: list[dict[str, Any]], metric: str) -> None:
    """One panel."""
    for row in rows:
        dashes = DASHES.get((row["method"], row["group"]))
        if dashes is None or metric not in row:
            continue
        scale = 1 if metric == "loss" else 100
        points = sorted((int(budget), scale * value) for budget, value in row[metric].items())
        is_exact = row["method"] == "exact"
        axis.plot(
            *zip(*points, strict=True),
            color="black" if is_exact else COLORS[row["reduction"]],
            linestyle=dashes,
            label="exact top" if is_exact else f"{row['method']}, {row['reduction']}",
        )
    axis.set_xscale("log", base=2)
    axis.set_ylabel(PANELS[metric])
    axis.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="default: the first result's name with .png")
    args = parser.parse_args()
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plotting needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (5 * len(args.results), 10)
    figure, axes = pyplot.subplots(
        len(PANELS), len(args.results), figsize=size, layout="constrained", squeeze=False
    )
    for path, column in zip(args.results, axes.T, strict=True):
        results = read_json(path, "benchmarks.answers.recall", "data")
        for metric, axis in zip(PANELS, column, strict=True):
            draw(axis, results["data"]["all"]["rows"], metric)
        title = f"{results['model']}, {results['heads']}/{results['kv_heads']} heads"
        column[0].set_title(f"{title}, {results['data']['all']['samples']} prompts")
        column[-1].set_xlabel("budget, tokens per KV head")
    axes[0, 0].legend(fontsize=7)
    figure.savefig(args.out or args.results[0].with_suffix(".png"), dpi=80)


if __name__ == "__main__":
    main()
