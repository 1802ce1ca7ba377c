"""Plots of a run: accuracy against what is kept and read, and against speed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.cache_dtype import FULL
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.summary import Summary
from vllm_kvx.tools.plots import draw

# More than these are told apart by nobody.
_MOST_CURVES = 12


def draw_all(
    directory: Path, summary: Summary, model: str, speed: Mapping[str, Mapping[str, float]] | None
) -> str:
    """Draws what there are answers for; a line on each plot, and on each that shows nothing."""
    if not summary.scored:
        return "No plot: no task is answered right or wrong."
    if not any(_scores(summary)):
        return "No plot: no answer is right, in full or under a policy."
    title = Path(model).name
    families, alone = families_of(summary)
    if families:
        said = [draw(directory / "kept.png", kept_curves, summary, title)]
    elif alone:
        said = [
            f"No plot over what is kept: {len(alone)} methods of one point each cannot be told "
            "apart; the table has them."
        ]
    else:
        said = ["No plot over what is kept: full alone has answers."]
    if speed is not None and gains_of(summary, speed):
        said.append(draw(directory / "speed.png", speed_points, summary, title, speed))
    elif speed is not None:
        said.append("No plot over speed: --speed has none of these policies.")
    return "\n".join(said)


def families_of(summary: Summary) -> tuple[dict[str, list[Row]], list[str]]:
    """The rows that a figure draws, by method, and the methods that only the table has."""
    families: dict[str, list[Row]] = {}
    for row in summary.rows:
        if not row.is_full and summary.cell(row) is not None:
            families.setdefault(family_of(row), []).append(row)
    alone: list[str] = []
    if len(families) > _MOST_CURVES:
        # Points without a curve make a thicket.
        alone = [name for name, members in families.items() if len(members) == 1]
        families = {name: members for name, members in families.items() if len(members) > 1}
    return families, alone


def kept_curves(pyplot: Any, summary: Summary, title: str) -> Any:
    """Right answers over the share of entries kept, and over the share that is read; by method."""
    # Short questions have the length 0.
    lengths = [*([0] if summary.has_short else []), *summary.lengths]
    figure, axes = pyplot.subplots(
        2, len(lengths), figsize=(4.2 * len(lengths), 7), sharey=True, squeeze=False
    )
    families, alone = families_of(summary)
    colors, lines = pyplot.get_cmap("tab10"), {}
    for column, length in enumerate(lengths):
        full = summary.cell(summary.yardstick, length=length)
        for line, what in enumerate(("kept", "read")):
            axis = axes[line][column]
            counts = [full.count] if full is not None else []
            for number, (family, members) in enumerate(families.items()):
                cells = [
                    cell
                    for row in members
                    if (cell := summary.cell(row, length=length)) is not None
                ]
                points = sorted((100 * getattr(c, what), c.score) for c in cells)
                if not points:
                    continue
                counts += [c.count for c in cells]
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
            if line == 0:
                what = f"{length:,} tokens" if length else "short questions"
                axis.set_title(f"{what}, {_number(counts)}", loc="left", fontsize=10)
            if column == 0:
                axis.set_ylabel("right answers (%)")
    axes[0][-1].legend(
        lines.values(), lines, fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0)
    )
    head = f"{title}\ndotted: {summary.yardstick}; bars: 95% confidence; n: prompts"
    if alone:
        head += f"\nin the table alone: {len(alone)} methods of one point each"
    figure.suptitle(head, x=0.02, ha="left", fontsize=11)
    figure.tight_layout()
    return figure


def gains_of(
    summary: Summary, speed: Mapping[str, Mapping[str, float]]
) -> dict[Row, Mapping[str, float]]:
    """The gains over stock that `speed` has of the summary's rows other than `full` itself."""
    found = {}
    for row in summary.rows:
        name = _in_speed(row)
        if not row.is_full and name in speed and summary.cell(row) is not None:
            found[row] = speed[name]
    return found


def _in_speed(row: Row) -> str:
    """What a file of benchmarks.engine.compare calls a row's policy."""
    is_quantized_full = row.policy == FULL and not row.is_full
    # Weights of one shape are as fast, tuned or not.
    return str(Row("stock" if is_quantized_full else row.policy, row.cache_dtype))


def speed_points(
    pyplot: Any, summary: Summary, title: str, speed: Mapping[str, Mapping[str, float]]
) -> Any:
    """Right answers over the gain in TTFT and in decoded tokens/s, a point for each policy."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    gains, counts = gains_of(summary, speed), list[int]()
    for axis, (what, label) in zip(
        axes,
        (("ttft", "TTFT, stock over policy"), ("tokens", "tokens/s, policy over stock")),
        strict=True,
    ):
        for row in summary.rows:
            gain = 1.0 if row.is_full else gains.get(row, {}).get(what)
            cell = summary.cell(row)
            if gain is None or cell is None:
                continue
            counts.append(cell.count)
            score = cell.score
            errors = [[100 * (score.value - score.low)], [100 * (score.high - score.value)]]
            axis.errorbar(
                [gain], [100 * score.value], yerr=errors, fmt="o", markersize=5, elinewidth=0.5
            )
            axis.annotate(str(row), (gain, 100 * score.value), fontsize=7)
        axis.set_xlabel(label)
        if what not in {each for gain in gains.values() for each in gain}:
            axis.set_title("no policy was measured so", loc="left", fontsize=10)
    axes[0].set_ylabel("right answers (%)")
    head = f"{title}; bars: 95% confidence; {_number(counts)} prompts"
    figure.suptitle(head, x=0.02, ha="left", fontsize=11)
    figure.tight_layout()
    return figure


def _number(counts: Sequence[int]) -> str:
    """`n = 8`, or `n = 6-8` where they differ."""
    if not counts:
        return "n = 0"
    low, high = min(counts), max(counts)
    return f"n = {low}" if low == high else f"n = {low}-{high}"


def _scores(summary: Summary) -> Iterator[float]:
    for row in summary.rows:
        cell = summary.cell(row)
        if cell is not None:
            yield cell.score.value


def check_speed(path: str, speed: Mapping[str, Mapping[str, float]], rows: Sequence[Row]) -> None:
    """Raise ToolError unless `speed`, read from that file, has any of the rows' policies."""
    if not any(_in_speed(row) in speed for row in rows if not row.is_full):
        raise ToolError(
            f"--speed {path} has none of these policies, so there is nothing to draw: it has "
            f"{', '.join(speed) or 'none at all'}"
        )


def read_speed(path: str) -> dict[str, dict[str, float]]:
    """Reads a file of benchmarks.engine.compare.

    Returns: by policy, the best ratios to stock: `ttft`, of TTFT, and `tokens`, of decoded
        tokens/s.

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
        raise ToolError(f"{path} is no result of benchmarks.engine.compare: {error}") from error


def family_of(row: Row) -> str:
    """What rows that differ in their rate or budget alone have in common, for a legend."""
    parts = []
    for part in row.policy.split("+"):
        name, _, rest = part.partition(":")
        head, dash, number = name.rpartition("-")
        if dash and number.isdigit():
            name = head
        keys = ("kv_rate=", "kv_budget=", "rate=", "dense_below=", "recent=")
        shown = [p for p in rest.split(",") if p and not p.startswith(keys)]
        parts.append(f"{name}:{','.join(shown)}" if shown else name)
    return str(replace(row, policy="+".join(parts)))
