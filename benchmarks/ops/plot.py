"""Draws a result of `benchmarks.ops.retrieval`: how far ops are from the bytes that they move.

`python -m benchmarks.ops.plot RESULT.json` writes RESULT.png beside it.
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.common.files import read_json

OPS = ("score", "select", "attend", "all")
MARKS = {
    "cuda": ("o", "tab:blue"),
    "cuda overlapped": ("P", "tab:cyan"),
    "triton": ("s", "tab:orange"),
    "triton unfused": ("p", "tab:pink"),
    "torch": ("x", "tab:gray"),
    "vllm persistent_topk": ("^", "tab:green"),
    "vllm top_k_per_row_decode": ("v", "tab:olive"),
    "xformers split-K, pages of 16": ("<", "tab:purple"),
    "xformers split-K, pages of 64": (">", "tab:brown"),
    "stock attention": ("D", "tab:red"),
}


def points(report: dict[str, Any], op: str) -> dict[str, list[tuple[float, float]]]:
    """By implementation, (bytes in MB, GB per second) of every case, fewest bytes first."""
    found: dict[str, list[tuple[float, float]]] = {}
    for case in report["cases"].values():
        for name, value in case.items():
            if not isinstance(value, dict) or "us" not in value:
                continue
            kind, _, backend = name.partition("/")
            if kind == "stock" and op == "all":
                backend = "stock attention"
            elif kind != op:
                continue
            megabytes = value["ideal_us"] * report["bytes_per_us"] / 1e6
            found.setdefault(backend, []).append((megabytes, megabytes / value["us"] * 1e3))
    return {backend: sorted(values) for backend, values in found.items()}


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    source = Path(sys.argv[1])
    report = read_json(source, "benchmarks.ops.retrieval", "bytes_per_us", "budget")
    figure, axes = pyplot.subplots(1, len(OPS), figsize=(4.2 * len(OPS), 4), sharey=True)
    for axis, op in zip(axes, OPS, strict=True):
        for backend, values in points(report, op).items():
            mark, color = MARKS[backend]
            axis.plot(*zip(*values, strict=True), mark, color=color, label=backend, alpha=0.8)
        axis.axhline(report["bytes_per_us"] / 1e3, color="black", linewidth=1)
        axis.set(xscale="log", yscale="log", title=op, xlabel="MB that it has to move")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("GB/s (line: device copy)")
    figure.suptitle(
        f"Retrieval in one layer, budget {report['budget']}, 8K to 512K entries x batch 1 to 32, "
        f"{report['about']['device']}"
    )
    figure.tight_layout()
    figure.savefig(source.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
