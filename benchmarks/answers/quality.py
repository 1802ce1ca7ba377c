"""Runs of `vllm-kvx evaluate` of one model as one result file, tables and a plot.

    python -m benchmarks.answers.quality NAME DIR [DIR ...]

The directories hold answers to the same questions under different policies, such as those of
engines that ran side by side. Where one's engines had another KV cache dtype than the first's, its
policies are named so, `full@fp8`, and stand beside the first's. A run that was cut off has the
answers that it gave, and one without any is left out. Writes
benchmarks/results/answers/quality-NAME.json and .png, and prints Markdown tables.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.about import about
from benchmarks.common.files import RESULTS, read_json, write_json
from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate import figures, report
from vllm_kvx.tools.evaluate.rows import FULL_ORIGINAL, FULL_ROW, Row
from vllm_kvx.tools.evaluate.store import IF_GIVEN, RESOLVED, RUN_FILE, SAME, Answer, Store
from vllm_kvx.tools.evaluate.summary import Cell, Summary
from vllm_kvx.tools.plots import draw

DTYPE = "kv_cache_dtype"


def read(directories: Sequence[Path]) -> tuple[list[Answer], dict[str, Any]]:
    """The answers of all directories, each question under each policy once, and their facts.

    Raises:
        SystemExit: a directory has no run of evaluate, or one of another model or other questions;
            or none has answers.
    """
    answers: dict[Any, Answer] = {}
    facts: dict[str, Any] = {}
    dtype: str | None = None
    for directory in directories:
        before = read_json(directory / RUN_FILE, "vllm-kvx evaluate", "command", "model")
        try:
            store = Store(directory, before)
        except ToolError as error:
            raise SystemExit(str(error)) from error
        if not any(store):
            print(f"{directory} has no answers: it is left out")
            continue
        own = _dtype_of_run(store)
        dtype = own if not facts else dtype
        named = None if own == dtype else own
        if own != dtype and not own:
            raise SystemExit(f"{directory} has a KV cache that is not quantized: name it first")
        for name in (*SAME, *IF_GIVEN):
            if facts and name != DTYPE and facts.get(name) != before.get(name):
                raise SystemExit(
                    f"{directory}: {name} is {before.get(name)!r}, not {facts.get(name)!r}"
                )
        for answer in store:
            answer = replace(answer, row=answer.row.over(named))
            answers.setdefault(answer.key, answer)
        commands = [*facts.get("commands", []), before.pop("command")]
        before.pop(RESOLVED, None)
        meant = {str(row.over(named)): str(name) for row, name in store.resolved.items()}
        resolved = {**facts.get(RESOLVED, {}), **meant}
        facts = {**before, **facts, "commands": commands, RESOLVED: resolved}
    if not answers:
        raise SystemExit("there are no answers")
    lengths = {a.question.length for a in answers.values() if a.question.length}
    facts["lengths"] = sorted(lengths)
    facts["tasks"] = list(dict.fromkeys(a.question.task for a in answers.values()))
    return list(answers.values()), facts


def _dtype_of_run(store: Store) -> str | None:
    """The dtype of the KV cache that `full` was asked over; None for one that loses nothing."""
    meant = store.resolved.get(FULL_ORIGINAL) or store.resolved.get(FULL_ROW)
    return FULL_ROW.over(meant.cache_dtype if meant else store.facts.get(DTYPE)).cache_dtype


def result(summary: Summary, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The result file; the runs' commands, date, device and versions are its head's."""
    known = {key: facts[key] for key in ("commit", "date", "device", "versions") if key in facts}
    what = f"Answers of {facts['model']} under policies, and what they keep of those of `full`."
    rest = {key: value for key, value in facts.items() if key not in (*known, "commands")}
    return {"about": about(what, facts["commands"], **known), **report.as_json(summary, rest)}


def markdown(summary: Summary, policies: Sequence[Row]) -> str:
    """A table of policies by lengths, in percent of right answers with their intervals."""
    lengths: list[int | None] = [*summary.lengths]
    head = ["policy", "kept", "read", *(f"{length:,}" for length in summary.lengths), "of `full`"]
    rows = [head, ["---"] * len(head)]
    for policy in policies:
        cells = [summary.cell(policy, length=length) for length in lengths]
        present = [cell for cell in cells if cell is not None]
        whole = summary.cell(policy)
        if not present or whole is None:
            continue
        ratio = whole.of_full
        share = (
            ""
            if ratio is None or policy == summary.yardstick
            else (f"{100 * ratio.value:.1f} [{100 * ratio.low:.1f}-{100 * ratio.high:.1f}]")
        )
        rows.append(
            [
                f"`{policy}`",
                f"{100 * whole.kept:.1f}",
                f"{100 * whole.read:.1f}",
                *map(_shown, cells),
                share,
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    score = cell.score
    return f"{100 * score.value:.1f} [{100 * score.low:.0f}-{100 * score.high:.0f}]"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.answers.quality", description=__doc__)
    parser.add_argument("name", help="of the result file")
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS / "answers")
    args = parser.parse_args()
    answers, facts = read(args.directories)
    summary = Summary(answers)
    path = args.results / f"quality-{args.name}.json"
    write_json(path, result(summary, facts))
    print(markdown(summary, summary.rows))
    print()
    for length in summary.lengths:
        print(f"{length:,} tokens, by task:\n{report.task_table(summary, length)}\n")
    print(draw(path.with_suffix(".png"), figures.kept_curves, summary, str(facts["model"])))
    print(path)


if __name__ == "__main__":
    main()
