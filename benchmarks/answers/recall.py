"""How much attention the retrieved tokens hold, against exact attention: the recall table.

`python -m benchmarks.answers.recall` on CPU, in about eleven minutes. For each budget, FIER's
groups, Quest's pages and each reduction over the query heads of a KV head:

- mass: the share of a query head's softmax on the tokens that are read;
- sharp: the same of those query heads alone that have half of their softmax on one token;
- overlap: the share of the budget that is also in the exact top (by softmax summed over heads).

Two sets of data: the demo checkpoint's keys and queries in decode, and random ones (`planted`). On
the checkpoint also the share of lookups that are answered right, of several in each of several
documents (`Demo.lookups`); both are in `recall_data`. `exact top` reads the exact top itself,
`softmax/2` is the policies' `softmax`, of halved products: 1-bit keys, half a group's range from
its middle, make products about twice as large as they are.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.answers import recall_model
from benchmarks.answers.recall_data import (
    ANSWER_BUDGETS,
    REDUCTIONS,
    Demo,
    Key,
    Step,
    answer_keys,
    planted,
    score,
    select,
)
from benchmarks.common.about import about, command_line
from benchmarks.common.files import RESULTS, ROOT, write_json

BUDGETS = (256, 512, 1024, 2048, 4096)
# Method and its group or page.
METHODS = (("fier", 32), ("fier", 64), ("fier", 128), ("quest", 16))
EXACT = ("exact", 1)
METRICS = ("mass", "sharp", "overlap")
# Fewer sharp query heads say nothing.
_LEAST_SHARP = 20
_COLORS = {"max": "#4878a8", "sum": "#d1802f", "softmax": "#3a923a", "softmax/2": "#c03d3e"}
_DASHES = dict(zip(METHODS, ("-", "--", ":", "-."), strict=True))


def measure(step: Step) -> dict[Key, dict[str, list[float]]]:
    """Values of every metric, method, reduction and budget: of each query head or KV head."""
    kv_heads, length = step.keys.shape[:2]
    query = step.query.unflatten(0, (kv_heads, -1))
    logits = torch.einsum("ghd,gnd->ghn", query, step.keys) * step.scaling
    probs = logits.softmax(dim=-1)  # (G, H / G, N)
    is_sharp = probs.amax(dim=-1) > 0.5
    order = probs.sum(dim=1).argsort(dim=-1, descending=True)
    best = torch.zeros(kv_heads, length, dtype=torch.bool)
    found: dict[Key, dict[str, list[float]]] = {}

    def add(key: Key, reads: list[Tensor]) -> None:
        mass = torch.stack([probs[head][:, read].sum(dim=-1) for head, read in enumerate(reads)])
        budget = key[-1]
        best.zero_().scatter_(1, order[:, :budget], True)
        found[key] = {
            "mass": mass.flatten().tolist(),
            "sharp": mass[is_sharp].tolist(),
            "overlap": [int(best[head, read].sum()) / budget for head, read in enumerate(reads)],
        }

    for budget in BUDGETS:
        add((*EXACT, "sum", budget), list(order[:, :budget]))
    for method, group in METHODS:
        products = score(step.query, step.keys, method, group)
        for reduction, budget in product(REDUCTIONS, BUDGETS):
            key = method, group, reduction, budget
            add(key, select(products, kv_heads, length, step.scaling, key))
    return found


def summarise(steps: list[tuple[int, dict[Key, dict[str, list[float]]]]]) -> list[dict[str, Any]]:
    """A row per method and reduction: means by budget, and how far they are from `max`.

    `mass_to_max` and the like are paired: the mean difference over samples and its standard error.
    """
    samples = sorted({sample for sample, _ in steps})

    def by_sample(key: Key, metric: str) -> list[float]:
        """Means of the samples that have values; none if there are too few."""
        values = [
            [value for sample, found in steps if sample == which for value in found[key][metric]]
            for which in samples
        ]
        enough = metric != "sharp" or sum(map(len, values)) >= _LEAST_SHARP
        return [statistics.mean(each) for each in values if each] if enough else []

    rows = []
    for method, group in (EXACT, *METHODS):
        for reduction in REDUCTIONS if method != "exact" else ("sum",):
            row: dict[str, Any] = {"method": method, "group": group, "reduction": reduction}
            for metric, budget in product(METRICS, BUDGETS):
                values = by_sample((method, group, reduction, budget), metric)
                if not values:
                    continue
                row.setdefault(metric, {})[str(budget)] = round(statistics.mean(values), 5)
                if method == "exact" or reduction == "max":
                    continue
                base = by_sample((method, group, "max", budget), metric)
                apart = [a - b for a, b in zip(values, base, strict=True)]
                error = statistics.stdev(apart) / len(apart) ** 0.5
                difference = [round(statistics.mean(apart), 5), round(error, 5)]
                row.setdefault(f"{metric}_to_max", {})[str(budget)] = difference
            rows.append(row)
    return rows


def summarise_answers(found: list[dict[Key | None, bool]]) -> list[dict[str, Any]]:
    """A row per method and reduction: by budget the share of lookups that are right.

    `to_max` is paired: how many are right here alone, and how many under `max` alone.
    """
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for key in answer_keys():
        method, group, reduction, budget = key
        named = {"method": method, "group": group, "reduction": reduction}
        row = rows.setdefault(key[:3], named)
        pairs = [(answers[key], answers[method, group, "max", budget]) for answers in found]
        share = statistics.mean(right for right, _ in pairs)
        row.setdefault("right", {})[str(budget)] = round(share, 5)
        if reduction != "max":
            alone = [pairs.count((True, False)), pairs.count((False, True))]
            row.setdefault("to_max", {})[str(budget)] = alone
    return list(rows.values())


def label(row: dict[str, Any]) -> str:
    """How a row is called in the table and the plot."""
    if row["method"] == "exact":
        return "exact top"
    unit = "group" if row["method"] == "fier" else "page"
    return f"{row['method']}, {unit} {row['group']}, {row['reduction']}"


def table(results: dict[str, Any]) -> str:
    """Markdown, in percent: the metrics of both sets of data, and right answers."""
    lines = []

    def add(title: str, budgets: Sequence[int], rows: dict[str, list[str]]) -> None:
        lines.append(f"### {title}\n\n| read | {' | '.join(map(str, budgets))} |")
        lines.append("|---" * (1 + len(budgets)) + "|")
        lines.extend(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())
        lines.append("")

    for name, data in results["data"].items():
        metrics = [metric for metric in METRICS if metric in data["rows"][0]]
        cells = {
            label(row): [
                " / ".join(f"{100 * row[m][str(b)]:.1f}" for m in metrics) for b in BUDGETS
            ]
            for row in data["rows"]
        }
        add(f"{name} ({' / '.join(metrics)}): {data['what']}", BUDGETS, cells)
    answers = results["answers"]
    cells = {
        label(row): [
            f"{100 * row['right'][str(b)]:.1f}" if str(b) in row["right"] else "-"
            for b in ANSWER_BUDGETS
        ]
        for row in answers["rows"]
    }
    title = f"right answers of {answers['samples']}, full attention {100 * answers['full']:.1f}"
    add(title, ANSWER_BUDGETS, cells)
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    """Lines over budgets: a column of panels for each set of data, and one of right answers."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plotting needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    def draw(axis: Any, rows: list[dict[str, Any]], metric: str, budgets: Sequence[int]) -> None:
        for row in rows:
            if (metric, row["method"]) == ("overlap", "exact"):
                continue
            style: dict[str, Any] = {"color": "black", "linestyle": (0, (1, 3))}
            if row["method"] != "exact":
                style["color"] = _COLORS[row["reduction"]]
                style["linestyle"] = _DASHES[row["method"], row["group"]]
            shares = {int(budget): 100 * share for budget, share in row[metric].items()}
            marker = "o" if row["method"] == "quest" else None
            axis.plot(
                *zip(*shares.items(), strict=True),
                marker=marker,
                markersize=3,
                label=label(row),
                **style,
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [str(b) for b in budgets])
        axis.grid(alpha=0.3)

    figure, axes = pyplot.subplots(4, 2, figsize=(12, 16), layout="constrained")
    for data, column in zip(results["data"].values(), axes.T, strict=True):
        for metric, axis in zip(METRICS, column, strict=False):
            if metric not in data["rows"][0]:
                axis.axis("off")
                continue
            draw(axis, data["rows"], metric, BUDGETS)
            axis.set_title(f"{data['keys']} {data['name']} keys: {metric}, %")
    answers = results["answers"]
    draw(axes[3, 0], answers["rows"], "right", ANSWER_BUDGETS)
    axes[3, 0].set_title(f"right answers, %; full attention {100 * answers['full']:.1f}")
    axes[3, 0].set_xlabel("budget, tokens per KV head")
    axes[3, 1].legend(*axes[0, 0].get_legend_handles_labels(), ncols=2, loc="center")
    axes[3, 1].axis("off")
    figure.savefig(path, dpi=80)


def machine() -> str:
    """Processor and number of cores."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name}, {os.cpu_count()} cores"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--checkpoint", type=Path, default=ROOT / "tests/checkpoints/lookup-8l")
    add("--length", type=int, default=8000, help="prompt tokens of the checkpoint")
    add("--random-length", type=int, default=32768)
    add("--prompts", type=int, default=8, help="whose decode steps are measured")
    add("--documents", type=int, default=16, help="in which is looked up")
    add("--questions", type=int, default=16, help="for each document")
    add("--draws", type=int, default=10)
    add("--out", type=Path, help="default: recall.json or recall-<model>.json, in results/answers")
    recall_model.add_arguments(parser)
    args = parser.parse_args(argv)
    name = f"recall{f'-{args.model.name}' if args.model else ''}.json"
    args.out = args.out or RESULTS / "answers" / name
    what = "What retrieval finds of the entries that exact attention weighs most, by budget."
    command = command_line("benchmarks.answers.recall", argv)
    head = {"about": about(what, command, packages=("transformers",)), "machine": machine()}
    if args.model:
        of_model = recall_model.run(args, head, lambda done: print(done, file=sys.stderr))
        write_json(args.out, of_model)
        print(recall_model.table(of_model["data"]))
        return
    if min(args.prompts, args.draws) < 2 or min(args.length, args.random_length) <= max(BUDGETS):
        parser.error(f"give two samples of each and lengths above {max(BUDGETS)}")

    torch.set_num_threads(1)  # What runs is small: with more they mostly wait for one another.
    began = time.monotonic()
    demo = Demo(args.checkpoint, args.length)
    sources: dict[str, tuple[str, int, int, Callable[[], Iterator[Step]]]] = {
        "checkpoint": (
            "decode steps of tests/checkpoints/lookup-8l on its own prompts, 2 query heads per "
            "KV head of 64 channels, layers from the third on",
            args.length,
            args.prompts,
            lambda: demo.steps(args.prompts),
        ),
        "random": (
            "gaussian keys with offsets and outlier channels, 64 tokens looked for by each of "
            "4 query heads per KV head of 128 channels",
            args.random_length,
            args.draws,
            lambda: planted(args.draws, args.random_length),
        ),
    }
    results: dict[str, Any] = {**head, "data": {}}
    every = (*EXACT, "sum", BUDGETS[0])
    for name, (what, keys, samples, steps) in sources.items():
        measured = []
        for step in steps():
            measured.append((step.sample, measure(step)))
            elapsed = time.monotonic() - began
            done = f"{name}: sample {step.sample + 1} of {samples}, {len(measured)} steps"
            print(f"\r{done}, {elapsed:.0f} s ", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        results["data"][name] = {
            "name": name,
            "what": what,
            "keys": keys,
            "samples": samples,
            "layer_steps": len(measured),
            "sharp_heads": sum(len(found[every]["sharp"]) for _, found in measured),
            "rows": summarise(measured),
        }
    found = []
    for answers in demo.lookups(args.documents, args.questions):
        found.append(answers)
        done = f"lookup {len(found)} of {args.documents * args.questions}"
        print(f"\r{done}, {time.monotonic() - began:.0f} s ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    results["answers"] = {
        "what": "tests/checkpoints/lookup-8l in transformers, float32; decode steps read what "
        "vllm_kvx.equations.retrieval selects, given the right tokens so far; right if all are, up "
        "to the end of sequence",
        "keys": args.length,
        "documents": args.documents,
        "samples": len(found),
        "full": statistics.mean(answers[None] for answers in found),
        "rows": summarise_answers(found),
    }
    results["seconds"] = round(time.monotonic() - began, 1)
    write_json(args.out, results)
    plot(results, args.out.with_suffix(".png"))
    print(table(results))


if __name__ == "__main__":
    main(sys.argv[1:])
