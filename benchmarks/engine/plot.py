"""Results of benchmarks.engine.compare as a table, and as a plot.

python -m benchmarks.engine.plot results.json plot.png
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.common.files import read_json


def table(results: dict[str, Any]) -> str:
    """A line per engine and case."""

    def number(value: Any, digits: int = 3) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    rows = [("engine", "case", "median ms", "spread", "vs stock", "ideal", "of ideal", "notes")]
    for name, engine in results["engines"].items():
        lines: dict[str, Any] = {"pool tokens": engine.get("pool") or {}, **engine["cases"]}
        for case, result in lines.items():
            value = result["tokens"] if "tokens" in result else result.get("median")
            notes = [f"{count}x{mode}" for mode, count in result.get("decode_graphs", {}).items()]
            if "tokens_per_s" in result:
                notes[:0] = [f"batch {result['batch']}", f"{result['tokens_per_s']:.0f} tok/s"]
            if "tokens" in result:
                notes.append(f"engine up in {engine.get('start_s', 0):.0f} s")
            if result.get("preemptions"):
                notes.append(f"{result['preemptions']} PREEMPTED")
            if "error" in result:
                notes.append("ERROR " + result["error"][-1][:90])
            ideal = [number(result.get(k)) for k in ("ratio_to_stock", "ideal")]
            spread, of_ideal = (result.get(k) for k in ("spread", "fraction_of_ideal"))
            percent = [f"{100 * x:.1f}%" if x is not None else "-" for x in (spread, of_ideal)]
            shown = str(value) if isinstance(value, int) else number(value)
            rows.append((name, case, shown, percent[0], *ideal, percent[1], ", ".join(notes)))
        if engine.get("error"):
            rows.append((name, "ERROR", "", "", "", "", "", engine["error"][-1][:90]))
    widths = [max(len(row[i]) for row in rows) for i in range(7)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row[:7], widths, strict=True)), row[7]])
        for row in rows
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """A bar for each gain over stock, its ideal as a mark; one panel per policy."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plotting needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {name: gains(engine) for name, engine in results["engines"].items()}
    panels = {name: lines for name, lines in panels.items() if name != "stock" and lines}
    if not panels:
        raise SystemExit("nothing to plot: no policy was measured beside stock")
    heights = [len(lines) for lines in panels.values()]
    figure, axes = pyplot.subplots(
        len(panels),
        figsize=(8, 1.2 * len(panels) + 0.35 * sum(heights)),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
        sharex=True,
    )
    for axis, (name, lines) in zip(axes[:, 0], panels.items(), strict=True):
        labels = [case for case, _, _ in lines]
        axis.barh(labels, [ratio for _, ratio, _ in lines], height=0.6, color="#4878a8")
        marks = [(case, ideal) for case, _, ideal in lines if ideal is not None]
        if marks:
            cases, ideals = zip(*marks, strict=True)
            axis.plot(ideals, cases, "|", color="black", markersize=14)
        for index, (_, ratio, _) in enumerate(lines):
            axis.text(ratio, index, f" {ratio:.2f}x", va="center", fontsize=8)
        axis.axvline(1, color="gray", linewidth=0.8, linestyle=":")
        axis.set_title(f"{results['model']['name']}, {name} (| is the ideal)", loc="left")
        axis.margins(x=0.12)
        axis.invert_yaxis()
    axes[-1, 0].set_xlabel("gain over stock vLLM (larger is better)")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def gains(engine: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """Case, ratio to stock and ideal of all that was measured beside stock."""
    lines = {"KV pool tokens": engine.get("pool") or {}, **engine.get("cases", {})}
    return [
        (case, result["ratio_to_stock"], result["ideal"])
        for case, result in lines.items()
        if "ratio_to_stock" in result
    ]


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    loaded = read_json(Path(sys.argv[1]), "benchmarks.engine.compare", "engines")
    print(table(loaded))
    if len(sys.argv) == 3:
        plot(loaded, Path(sys.argv[2]))
