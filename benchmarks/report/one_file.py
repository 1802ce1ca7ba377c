"""The table of one file of `benchmarks.engine.compare`: everything that it measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.names import STOCK, baseline_of
from benchmarks.report.cells import MISSING, table, value, words
from benchmarks.report.files import Figure, File


def alone(file: File, found: Sequence[Figure]) -> list[str]:
    """Lines for one file: gains over stock, or what engines took where stock was not in the run.

    found: the figures of all files.
    """
    baseline = baseline_of(file.content["engines"]) or STOCK
    head = ["policy", "case", baseline, "policy's", "gain", "ideal", "reached", "spread"]
    rows = []
    for each in found:
        if each.file != file:
            continue
        ideal = each.ideal
        rows.append(
            [
                f"`{each.engine}`",
                words(each.case, each.result),
                value(each.stock),
                value(each.result),
                f"{each.ratio:.3f}x",
                "none" if ideal is None else f"{ideal:.3f}x",
                "" if ideal is None else f"{100 * each.ratio / ideal:.1f}%",
                _spread(each.result),
            ]
        )
    for name, engine in file.content["engines"].items():
        for case, result in engine.get("cases", {}).items():
            if "error" in result:
                why = str(result["error"][-1])[:80].replace("|", "/")
                rows.append([f"`{name}`", words(case), "", f"{MISSING}: {why}", *[""] * 4])
            elif baseline not in file.content["engines"]:
                own = [value(result), "", "", "", _spread(result)]
                rows.append([f"`{name}`", words(case, result), MISSING, *own])
    return [*_rooms(file), *table(head, rows)]


def _spread(result: Mapping[str, Any]) -> str:
    spread = result.get("spread")
    return "" if spread is None else f"{100 * spread:.1f}%"


def _rooms(file: File) -> list[str]:
    """Which servers had room for several policies, and the file's own note, if any."""
    lines = []
    for engine, entry in file.content["engines"].items():
        if others := entry.get("room_for"):
            names = ", ".join(f"`{name}`" for name in others)
            lines += [f"The server of `{engine}` had room for {names}, too. Figures of these, and"]
            lines += ["of compositions, are of requests to it that name them.", ""]
    if note := file.content.get("note"):
        lines += [note, ""]
    return lines
