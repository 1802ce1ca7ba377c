"""A run as text: a table for people, and JSON for programs."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.evaluate.differences import differences
from vllm_kvx.tools.evaluate.intervals import LEAST_DIFFERENT, Interval
from vllm_kvx.tools.evaluate.recovery import Recovery, bucket_name, recoveries
from vllm_kvx.tools.evaluate.shares import untouched_tokens
from vllm_kvx.tools.evaluate.summary import PERPLEXITY, Cell, Summary, untested
from vllm_kvx.tools.kv_layers import KVLayers

# What a recovery is made of, see ``Recovery``.
_PARTS = ("lost", "back", "newly_lost")


def table(summary: Summary, layers: KVLayers | None = None) -> str:
    """Policies by lengths: right answers of all prompts in percent, the interval and n.

    layers: the model's, if not all of them have full attention.
    """
    lengths: list[int | None] = [*summary.lengths]
    # Short questions have no length and stand in the last column alone.
    if len(lengths) != 1 or summary.has_short:
        lengths.append(None)
    head = ["policy", "kept", "read", *map(_length, lengths), "of full", "difference"]
    lines = [head]
    for row in summary.rows:
        whole = summary.cell(row)
        if whole is None:
            continue
        cells = [summary.cell(row, length=length) for length in lengths]
        lines.append(
            [
                str(row),
                _percent(whole.kept, 1),
                _percent(whole.read, 1),
                *map(_score, cells),
                "" if row == summary.yardstick else _interval(whole.of_full),
                "" if row == summary.yardstick else _points(whole.from_full),
            ]
        )
    parts = []
    if len(lines) > 1:
        parts.append(_aligned(lines))
        parts.append(
            "Right answers in %, 95% confidence interval, n prompts; tasks: "
            + ", ".join(summary.scored)
            + ".\nkept: share of a prompt's KV entries in the "
            "cache; read: share of them that a decode step reads;\nof full: ratio to "
            f"{summary.yardstick} on the same prompts; difference: from it, in points, paired by "
            "prompt."
        )
        if layers is not None and summary.lengths:
            parts.append(layers.bounds(summary.lengths))
        if said := notes(summary):
            parts.append("\n".join(said))
    if PERPLEXITY in summary.tasks:
        parts.append(_perplexity(summary))
    if recovered := recoveries(summary):
        parts.append(_recovery(recovered))
    return "\n\n".join(parts)


def notes(summary: Summary) -> list[str]:
    """The rows whose figures are not of what they drop: of no answer, or not of every answer."""
    found = []
    for row in summary.rows:
        cell = summary.cell(row)
        if cell is None:
            continue
        waits = f"{untouched_tokens(parse_policy(row.policy))} tokens"
        if why := untested(row, cell):
            found.append(f"{row} {why}.")
        elif cell.early:
            found.append(
                f"{row}: {cell.early} of {cell.count} answers ended within {waits}, before "
                "retention dropped anything."
            )
        if cell.untold:
            found.append(
                f"{row}: {cell.untold} of {cell.count} answers are of an older version, which does "
                f"not say whether they have more than {waits}: another --output asks them again."
            )
    return found


def task_table(summary: Summary, length: int | None = None) -> str:
    """Policies by tasks, at one length or over all; with same answers, and loops if any could be.

    same: answers that are the yardstick's word for word. loops: answers that end in a loop, of the
    tasks in which any answer is long enough.
    """
    lines = [["policy", *summary.scored, "same"] + ["loops"] * bool(summary.looping)]
    for row in summary.rows:
        cells = [summary.cell(row, task, length) for task in summary.scored]
        whole = summary.cell(row, length=length)
        line = [str(row), *(_digits(c.score if c else None, 0) for c in cells)]
        line.append(_digits(whole.same if whole else None, 0))
        if summary.looping:
            line.append(_digits(whole.loops if whole else None, 1))
        lines.append(line)
    counts = [summary.cell(summary.yardstick, task, length) for task in summary.scored]
    line = ["n", *("-" if c is None else str(c.count) for c in counts)]
    lines.append(line + [""] * (len(lines[0]) - len(line)))
    return _aligned(lines)


def bucket_table(summary: Summary) -> str:
    """Policies by the tokens that prompts really have: right answers in percent, and n."""
    lines = [["policy", *map(bucket_name, summary.buckets)]]
    for row in summary.rows:
        cells = [summary.cell(row, bucket=bucket) for bucket in summary.buckets]
        lines.append([str(row), *map(_score, cells)])
    return _aligned(lines)


def text(summary: Summary, layers: KVLayers | None = None) -> str:
    """All tables of a run; `layers` as in ``table``."""
    parts = [table(summary, layers)]
    if summary.scored:
        loops = "; loops: answers that end in a loop" if summary.looping else ""
        what = f"By task; same: answers that are those of {summary.yardstick}{loops}, in %:"
        parts.append(f"{what}\n{task_table(summary)}")
        parts.append(f"By tokens of the prompt:\n{bucket_table(summary)}")
    if len(summary.rows) > 2 and summary.scored:
        parts.append(_differences(summary))
    return "\n\n".join(parts) + "\n"


def as_json(
    summary: Summary, facts: Mapping[str, Any], layers: KVLayers | None = None
) -> dict[str, Any]:
    """Facts of the run and every cell; scores and their intervals are shares, not percent.

    layers: as in ``table``. What share of the model's KV policies are about is by length.
    """
    cells = []
    lengths: Sequence[int | None] = [*summary.lengths, None]
    for row in summary.rows:
        for task in [*summary.tasks, None]:
            for length in lengths:
                cell = summary.cell(row, task, length)
                if cell is not None:
                    where = {"policy": str(row), "task": task or "all", "length": length or "all"}
                    cells.append(where | _cell_json(cell))
    buckets = [
        {"policy": str(row), "tokens": [bucket.low, bucket.high]} | _cell_json(cell)
        for row in summary.rows
        for bucket in summary.buckets
        if (cell := summary.cell(row, bucket=bucket)) is not None
    ]
    if layers is not None:
        shares = {str(each): round(layers.share(each), 5) for each in summary.lengths}
        held = {"layers": layers.total, "full_attention": layers.full, "share_of_kv": shares}
        facts = {**facts, "policy_layers": held}
    found = {**facts, "yardstick": str(summary.yardstick), "cells": cells, "by_tokens": buckets}
    found["differences"] = [
        {
            **{"better": str(each.better), "worse": str(each.worse), "n": each.count},
            **{"differ": each.differ, "by": _rounded(each.by)},
            "significant": each.is_significant,
        }
        for each in differences(summary)
    ]
    found["scores"] = _scores(summary)
    if summary.yardstick.on_original:
        found["recovery"] = [
            {
                **{"policy": str(each.row), "over": each.over, "n": each.count},
                **{"full": round(each.full, 5), "cut": round(each.cut, 5)},
                **{"tuned": round(each.tuned, 5), "recovery": _rounded(each.share)},
                **{name: part and round(part, 5) for name, part in _parts(each)},
            }
            for each in recoveries(summary, by_task=True)
        ]
    return found


def _cell_json(cell: Cell) -> dict[str, Any]:
    return {
        "n": cell.count,
        "score": _rounded(cell.score),
        "of_full": _rounded(cell.of_full),
        "from_full": _rounded(cell.from_full),
        "same": _rounded(cell.same),
        "loops": _rounded(cell.loops),
        "kept": round(cell.kept, 5),
        "read": round(cell.read, 5),
        "tokens": round(cell.tokens, 1),
        **({"early": cell.early} if cell.early else {}),
        **({"untold": cell.untold} if cell.untold else {}),
    }


def _scores(summary: Summary) -> list[dict[str, Any]]:
    """Every answer's score, so that other runs over the same prompts can be paired with them.

    A string of numbers has a prompt's score at the prompt's index; `-` where none was answered.
    """
    found = []
    for row in summary.rows:
        answers = summary.answers(row)
        for task, length in dict.fromkeys((each.task, each.length) for each in answers):
            by_index = {
                question.index: answer.score
                for question, answer in answers.items()
                if (question.task, question.length) == (task, length)
            }
            scores = (by_index.get(index) for index in range(max(by_index) + 1))
            text = " ".join("-" if s is None else f"{round(s, 5):g}" for s in scores)
            found.append({"policy": str(row), "task": task, "length": length, "scores": text})
    return found


def _rounded(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [round(value, 5) for value in interval]


def _parts(recovery: Recovery) -> list[tuple[str, float | None]]:
    return [(name, getattr(recovery, name)) for name in _PARTS]


def _differences(summary: Summary) -> str:
    rows = [["better", "worse", "by points", "n", "differ", ""]]
    for each in differences(summary):
        told = "told apart" if each.is_significant else ""
        names = [str(each.better), str(each.worse)]
        rows.append([*names, _points(each.by), str(each.count), str(each.differ), told])
    return (
        "Differences between policies on the same prompts, by paired bootstrap; told apart: the "
        f"interval leaves 0 out,\nand at least {LEAST_DIFFERENT} texts differ:\n{_aligned(rows)}"
    )


def _recovery(recovered: Sequence[Recovery]) -> str:
    rows = [["policy", "over", "n", "full", "cut", "tuned", "recovery", *_PARTS]]
    for each in recovered:
        is_nats = each.over == PERPLEXITY
        means = (each.full, each.cut, each.tuned)
        shown = [f"{mean:.4f}" if is_nats else f"{100 * mean:.1f}" for mean in means]
        share = "undefined" if each.share is None else _interval(each.share)
        parts = ["" if part is None else f"{100 * part:.1f}" for _, part in _parts(each)]
        rows.append([str(each.row), each.over, str(each.count), *shown, share, *parts])
    lines = [
        "Recovery: (tuned - cut) / (full - cut), by scores in %, and perplexity by nats a token;",
        "full and cut: the original in full and under the policy; tuned: the model under it;",
        "lost, back: what the cut loses, question by question, and what of it tuning brings back;",
        "newly_lost: what tuning loses of what the cut had kept.",
    ]
    if any(each.share is None for each in recovered):
        lines.append(
            "undefined: the cut alone loses nothing significant on these prompts, or too few of "
            "them differ."
        )
    return _aligned(rows) + "\n" + "\n".join(lines)


def _perplexity(summary: Summary) -> str:
    lines = [["policy", "nats a token", f"above {summary.yardstick}"]]
    for row in summary.rows:
        cell = summary.cell(row, PERPLEXITY)
        if cell is None:
            continue
        apart = cell.of_full
        above = (
            ""
            if apart is None or row == summary.yardstick
            else (f"{apart.value:+.4f} [{apart.low:+.4f}, {apart.high:+.4f}]")
        )
        lines.append([str(row), f"{cell.score.value:.4f} (n={cell.count})", above])
    return "Held-out text under the policy's cache:\n" + _aligned(lines)


def _length(length: int | None) -> str:
    return "all" if length is None else f"{length:,}"


def _digits(share: Interval | None, digits: int) -> str:
    return "-" if share is None else f"{100 * share.value:.{digits}f}"


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


def _points(difference: Interval | None) -> str:
    if difference is None:
        return "-"
    value, low, high = (100 * each for each in difference)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
