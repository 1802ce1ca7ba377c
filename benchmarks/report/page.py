"""One page of everything measured, from the result files alone.

    python -m benchmarks.report
    python -m benchmarks.report --check

Writes docs/results/report.md, its plots in docs/results/report/, answers-and-gains.md beside it,
once it is measured what-one-gpu-serves.md, and the table of policies in README.md. `--check` writes
nothing, and fails when they are not what the files give. No figure is written by hand: a new file
in benchmarks/results and this command are all that a new figure takes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.files import RESULTS, ROOT
from benchmarks.common.names import STOCK
from benchmarks.report import loads as under
from benchmarks.report import one_file, readme, tables, tradeoffs, within
from benchmarks.report import plots as pictures
from benchmarks.report.cells import MISSING
from benchmarks.report.files import File, Kept, Load, figures_of, kept_of, loads_of, read
from benchmarks.report.plots import Plot

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "results" / "report.md"
# Beside the page.
TRADEOFFS = "answers-and-gains.md"
PUBLISHED = Path(__file__).resolve().parent / "published.json"

_ABOUT = """
# Report

Made by `python -m benchmarks.report` from the files in
[benchmarks/results](../../benchmarks/results); no figure is written by hand. Numbers in brackets
are the files, [listed below](#files). Superseded files, in the folder `old`, are not read. [How it
is measured](../../benchmarks/README.md), [with comments](measurements.md).

A gain is over stock vLLM in the same file, on the same machine; larger is better. In parentheses
are the ideal and how much of it is reached. Ideals are counted by `vllm_kvx/tools/ideal`: FLOPs
for TTFT, bytes for decode, KV entries for the pool, and for requests/s at saturation both, at the
data sheet's peaks. Where more than 100% is reached, stock is further from the hardware than the
policy.

The ideals of TTFT take it that the last layer which sees the whole prompt is
[split](../internals/architecture.md#a-layer-that-is-split), which was off in all files up to
2026-11-23 and in that of turns. Over an fp8 cache attention's products count
half, since they are products of fp8.

Shapes with random weights have speeds and no answers. Answers were measured on other, small models,
under the same parameters, and where a policy names a layer, at the same share of the depth; those
of another layer are called so. Of several task sets the least and the most are given. Those of
`speed-K` are at the cutoff that is nearest in share of the layers, with weights that were tuned for
it and with weights that were not.
"""
_ANSWERS = """
"Not tuned" and "tuned" are about `speed-K`; all other policies take the weights as they are.
Retrieval was on at every length (`dense_below=0`). In files dated before 2026-11-26, a
name without `kv_floor` means `kv_floor=0`; from that day on a row named `snapkv:kv_floor=512` is
today's `snapkv`. All policies and tasks: [quality.md](quality.md). Several task sets, and gains of
the same settings beside them: [answers-and-gains.md](answers-and-gains.md).
"""
_LOAD = """
`vllm bench serve` against `vllm serve`, random prompts, no prefix cache. "At once" is the most
requests that ran at the same time. ITL is the time between two tokens of a request: while long
prompts come in, its p99 is what running decodes wait.
"""
_STARTS = """
With random weights, which no disk has to give. Cold: nothing compiled is in any cache; warm: what
the cold start left is. Smaller is better.
"""
_COMPOSED = """
The product of decode gains overstates: what one part no longer reads, another cannot save. The
ideal knows that.
"""


def page(files: Sequence[File], others: dict[str, str], folder: str) -> tuple[str, list[Plot]]:
    """The page and its plots. folder: where the plots lie, from the page."""
    every, loads, kept = figures_of(files), loads_of(files), kept_of(files)
    # Gains over stock with another KV cache stand in the table of their own file alone.
    found = [each for each in every if each.baseline == STOCK]
    lines, shown = _ABOUT.strip().splitlines(), list[Plot]()

    def add(plots: Sequence[Plot]) -> None:
        for plot in plots:
            title = plot.title.partition("\n")[0]
            lines.extend(["", f"![{title}]({folder}/{plot.name}.png)"])
        shown.extend(plots)

    for gpu, model in _places(files):
        here = [f for f in found if (f.file.gpu, f.file.model) == (gpu, model)]
        there = [x for x in loads if (x.file.gpu, x.file.model) == (gpu, model)]
        layers = next(f.content["model"]["layers"] for f in files if f.model == model)
        lines += ["", f"## At a glance: {gpu}, {model}", "", *tables.glance(here)]
        lines += ["", "With all prompts at once, and the answers that other models kept:", ""]
        lines += tables.glance_of_load(here, there, kept, layers)
        add(pictures.plots(f"{gpu}, {model}", here, there))
    lines += ["", "## Under load", "", *_LOAD.strip().splitlines()]
    lines += _within_limits(files)
    for lengths in under.all_lengths(loads):
        lines += ["", f"### {lengths} tokens in and out", "", *under.under_load(loads, lengths)]
    lines += _beside_others(loads)
    lines += ["", "## While a long prompt comes in", ""]
    lines += [
        "Waits of four decoding requests between two tokens, by `benchmarks.engine.compare`.",
        "",
    ]
    lines += tables.waits(files)
    lines += ["", "## Until an engine is up", "", *_STARTS.strip().splitlines(), ""]
    lines += tables.starts(files)
    lines += ["", "## Policies composed", "", *_COMPOSED.strip().splitlines(), ""]
    lines += tables.compositions(files)
    lines += ["", "## Sessions of many turns", "", *tables.sessions(files)]
    lines += ["", "## Answers kept", "", *_ANSWERS.strip().splitlines(), ""]
    lines += tables.answers(found, loads, kept)
    add(pictures.answers(found, loads, kept))
    lines += ["", "## Where we lose", "", "Below stock by more than 1%:", ""]
    lines += tables.losses(found, loads)
    lines += ["", "Below four fifths of the ideal:", "", *tables.far(found, loads)]
    lines += _lost(kept)
    lines += ["", "## One request alone, and full pools", ""]
    lines += ["Decode in parentheses: requests at once. Spread is (largest - smallest) / median."]
    for file in files:
        if file.kind == "compare":
            lines += ["", f"### {file.title}: {file.model}, {file.gpu}, {file.date}", ""]
            lines += one_file.alone(file, every)
    lines += ["", "## Files", "", *tables.sources(files)]
    for why in dict.fromkeys(others.values()):
        names = ", ".join(f"`{name}`" for name, reason in others.items() if reason == why)
        lines += ["", f"Not read, {why}: {names}."]
    return "\n".join(lines) + "\n", shown


def _places(files: Sequence[File]) -> list[tuple[str | None, str]]:
    """Machines and models with speeds, those with most files first."""
    places = [(f.gpu, f.model) for f in files if f.kind in ("compare", "serving")]
    return sorted(set(places), key=lambda place: (-places.count(place), str(place)))


def _within_limits(files: Sequence[File]) -> list[str]:
    """Where rates within limits of TTFT and TPOT are, or that there are none."""
    there = bool(within.of_kind(files))
    where = f"[what one GPU serves]({within.NAME})" if there else f"{MISSING} yet"
    return ["", f"The highest rate within limits of TTFT and TPOT: {where}."]


def _beside_others(loads: Sequence[Load]) -> list[str]:
    """What others publish in these settings; nothing until they are measured here."""
    lines = []
    for known in json.loads(PUBLISHED.read_text(encoding="utf-8")).values():
        if rows := under.published(loads, known):
            lines += ["", "### Beside what others publish", ""]
            lines += [f"{known['what']} ([source]({known['source']})). Another GPU, engine and"]
            lines += ["baseline: gains are compared, not times.", "", *rows]
    return lines


def _lost(kept: Sequence[Kept]) -> list[str]:
    """How many policies certainly lost answers."""
    lost = sum(each.of_full[2] < 1 for each in kept)
    text = f"Answers: of {len(kept)} evaluations of a policy, {lost} have an interval below 100%."
    return ["", text]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if page or plots are not so")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE, help="its plots lie in a folder beside")
    parser.add_argument("--readme", type=Path, default=README, help="where the table stands")
    args = parser.parse_args(argv)
    folder = args.page.with_suffix("")
    if not args.results.is_dir():
        parser.error(f"--results: there is no folder {args.results}")
    files, others = read(args.results)
    text, plots = page(files, others, folder.name)
    plots += readme.plots(files)
    pages = {args.page: text}
    for name, lines in ((TRADEOFFS, tradeoffs.page(files)), (within.NAME, within.page(files))):
        pages[args.page.with_name(name)] = "".join(f"{line}\n" for line in lines)
    old = args.readme.read_text(encoding="utf-8")
    try:
        new = readme.with_table(old, readme.table(files))
    except ValueError as error:
        print(f"{args.readme.name}: {error}", file=sys.stderr)
        new = None
    stale = {path.name for path in folder.glob("*.png")} - {f"{each.name}.png" for each in plots}
    if args.check:
        wrong = [plot.name for plot in plots if not pictures.is_drawn(plot, folder)]
        wrong += sorted(stale)
        for path, wanted in pages.items():
            there = path.read_text(encoding="utf-8") if path.exists() else ""
            if there != wanted:
                wrong.append(path.name)
        if old != new:
            wrong.append(args.readme.name)
        if wrong:
            print(f"not what the files give: {', '.join(wrong)}; run python -m benchmarks.report")
        return 1 if wrong else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (folder / name).unlink()
    for plot in plots:
        if not pictures.is_drawn(plot, folder):
            pictures.draw(plot, folder)
    for path, wanted in pages.items():
        if wanted:
            path.write_text(wanted, encoding="utf-8")
        else:
            path.unlink(missing_ok=True)
    print(f"{args.page}: {len(plots)} plots")
    if new is None:
        return 1
    args.readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
