"""A run as text: a table for people, and JSON for programs."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_kvx.evaluation.intervals import Interval
from vllm_kvx.evaluation.summary import FULL, PERPLEXITY, Cell, Summary


def table(summary: Summary) -> str:
    """Policies by lengths: right answers of all prompts in percent, the interval and n."""
    lengths: list[int | None] = [*summary.lengths]
    if len(lengths) != 1:
        lengths.append(None)
    head = ["policy", "kept", "read", *map(_length, lengths), "of full"]
    rows = [head]
    for policy in summary.policies:
        whole = summary.cell(policy)
        if whole is None:
            continue
        cells = [summary.cell(policy, length=length) for length in lengths]
        rows.append(
            [
                policy,
                _percent(whole.kept, 1),
                _percent(whole.read, 1),
                *map(_score, cells),
                "" if policy == FULL else _interval(whole.of_full),
            ]
        )
    parts = []
    if len(rows) > 1:
        parts.append(_aligned(rows))
        parts.append(
            "Right answers in %, 95% confidence interval, n prompts; tasks: "
            + ", ".join(summary.scored)
            + ".\nkept: share of a prompt's KV entries in the "
            "cache; read: share of them that a decode step reads;\nof full: ratio to full "
            "on the same prompts."
        )
    if PERPLEXITY in summary.tasks:
        parts.append(_perplexity(summary))
    return "\n\n".join(parts)


def task_table(summary: Summary, length: int | None = None) -> str:
    """Policies by tasks, at one length or over all."""
    rows = [["policy", *summary.scored]]
    for policy in summary.policies:
        cells = [summary.cell(policy, task, length) for task in summary.scored]
        rows.append([policy, *("-" if c is None else f"{100 * c.score.value:.0f}" for c in cells)])
    counts = [summary.cell(FULL, task, length) for task in summary.scored]
    rows.append(["n", *("-" if c is None else str(c.count) for c in counts)])
    return _aligned(rows)


def as_json(summary: Summary, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of the run and every cell; scores and their intervals are shares, not percent."""
    cells = []
    lengths: Sequence[int | None] = [*summary.lengths, None]
    for policy in summary.policies:
        for task in [*summary.tasks, None]:
            for length in lengths:
                cell = summary.cell(policy, task, length)
                if cell is None:
                    continue
                cells.append(
                    {
                        "policy": policy,
                        "task": task or "all",
                        "length": length or "all",
                        "n": cell.count,
                        "score": [round(value, 5) for value in cell.score],
                        "of_full": cell.of_full and [round(value, 5) for value in cell.of_full],
                        "kept": round(cell.kept, 5),
                        "read": round(cell.read, 5),
                        "tokens": round(cell.tokens, 1),
                    }
                )
    return {**facts, "cells": cells}


def _perplexity(summary: Summary) -> str:
    rows = [["policy", "nats a token", "above full"]]
    for policy in summary.policies:
        cell = summary.cell(policy, PERPLEXITY)
        if cell is None:
            continue
        apart = cell.of_full
        above = (
            ""
            if apart is None or policy == FULL
            else (f"{apart.value:+.4f} [{apart.low:+.4f}, {apart.high:+.4f}]")
        )
        rows.append([policy, f"{cell.score.value:.4f} (n={cell.count})", above])
    return "Held-out text under the policy's cache:\n" + _aligned(rows)


def _length(length: int | None) -> str:
    return "all" if length is None else f"{length:,}"


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f}%"


def _score(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    score = cell.score
    ends = f"{100 * score.low:.0f}-{100 * score.high:.0f}"
    return f"{100 * score.value:.1f} [{ends}] n={cell.count}"


def _interval(ratio: Interval | None) -> str:
    if ratio is None:
        return "-"
    return f"{100 * ratio.value:.1f}% [{100 * ratio.low:.1f}-{100 * ratio.high:.1f}]"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
