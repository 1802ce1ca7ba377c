"""Which answers stay where a decode step reads what another layer or an earlier step chose.

    python -m benchmarks.answers.reuse_answers --model DIR --out NAME.json --budgets 512 2048

The checkpoint prefills each prompt once, with full attention, and answers greedily by every way to
choose what decode steps read:

- `full`: everything.
- `own`: each layer, KV head and step chooses by the exact products, as `fier` does but for the
  error of its 1-bit keys.
- `steps:N`: the first of N steps chooses; the others read that, and all entries since.
- `layers:N`: the first of N layers chooses for the others, KV head by KV head: `reuse_layers=N`.

With `/1-bit` behind it a way but `full` scores by 1-bit keys. The first two layers read everything,
and all read the newest 32 entries. What recall says of the same choices: benchmarks.answers.reuse.

Prompts are of tasks that `vllm-kvx evaluate` knows, generated ones at `--length` tokens. Tasks take
turns. The file is rewritten after every prompt; a run that finds it goes on from there, also with
ways and budgets that it lacks. The exit status is 1 while prompts are left.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.answers.reuse import RECENT
from benchmarks.answers.reuse_model import ONE_BIT, ReuseModel, Way
from benchmarks.common.about import about, command_line
from benchmarks.common.files import read_json, write_json
from vllm_kvx.errors import ToolError
from vllm_kvx.tools.evaluate.intervals import Interval, of_difference, of_ratio
from vllm_kvx.tools.tasks.base import FixedTask, Task
from vllm_kvx.tools.tasks.prompts import EncodedSample, encode, fitted
from vllm_kvx.tools.tasks.table import tasks_named

EXACT = ("own", "steps:2", "steps:4", "layers:2", "layers:4")
WAYS = (*EXACT, *(way + ONE_BIT for way in EXACT))
# Rows over the prompts of all tasks, where there are several.
ALL = "all"
Prompt = dict[str, Any]


class Asked(NamedTuple):
    """A prompt, with its task and its number there, and the ways that are to answer it."""

    task: Task | FixedTask
    number: int
    encoded: EncodedSample
    ways: Sequence[Way]


def prompts_of(
    args: argparse.Namespace, tokenizer: Any, prompts: Sequence[Prompt]
) -> Iterator[Asked]:
    """Tasks take turns; of a data set the first samples, as many as it has.

    prompts: those that have answers. They come again where a way has none, with `full` beside it.
    """
    done = {(prompt["task"], prompt["number"]): prompt["scores"] for prompt in prompts}
    for number in range(args.prompts):
        for task in args.named:
            answered = done.get((task.name, number), {})
            ways = [way for way in args.each if name_of(way) not in answered]
            if not ways:
                continue
            if answered:
                ways = [Way("full"), *ways]
            if isinstance(task, Task):
                seed = f"reuse answers {args.seed} {number} {task.name}"
                yield Asked(task, number, fitted(task, seed, args.length, tokenizer), ways)
            elif number < len(task.samples()):
                sample = task.samples()[number]
                yield Asked(task, number, encode(sample, tokenizer, task.chat), ways)


def name_of(way: Way) -> str:
    """What a file calls a way."""
    return f"{way} {way.budget}" if way.budget else str(way)


def ways_of(content: Mapping[str, Any]) -> list[Way]:
    """The ways of a file, by the names that `name_of` gives."""
    pairs = [name.partition(" ") for name in content["ways"]]
    return [Way.parse(way, int(budget or 0)) for way, _, budget in pairs]


def one_prompt(model: ReuseModel, asked: Asked) -> Prompt:
    """Each way's score, whether its answer is the one of `full`, and how long that is."""
    began = time.perf_counter()
    ids = asked.encoded.token_ids
    answers = model.answers(ids, asked.ways, asked.task.max_tokens)
    texts = [model.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
    scores = [asked.task.score(text, asked.encoded.sample) for text in texts]
    names = [name_of(way) for way in asked.ways]
    full = answers[names.index("full")]
    return {
        "task": asked.task.name,
        "number": asked.number,
        "tokens": len(ids),
        "answer": len(full),
        "scores": {name: round(score, 4) for name, score in zip(names, scores, strict=True)},
        "same": [name for name, each in zip(names, answers, strict=True) if each == full],
        "seconds": round(time.perf_counter() - began, 1),
    }


def add(prompts: list[Prompt], found: Prompt) -> None:
    """Adds a prompt, or to the one that there is the answers of further ways."""
    for prompt in prompts:
        if (prompt["task"], prompt["number"]) == (found["task"], found["number"]):
            prompt["scores"] = found["scores"] | prompt["scores"]
            prompt["same"] += [name for name in found["same"] if name not in prompt["same"]]
            prompt["seconds"] = round(prompt["seconds"] + found["seconds"], 1)
            return
    prompts.append(found)


def in_percent(found: Interval | None) -> list[float] | None:
    """Value, lower and upper end."""
    return found and [round(100 * each, 2) for each in found]


def summarise(prompts: Sequence[Prompt], ways: Sequence[Way]) -> list[dict[str, Any]]:
    """A row for each task and way, over the prompts that the way has answered.

    `right` is in %. `kept` is the ratio to `full`'s, and `to_own` the difference to the choices of
    the same budget and scores that no other layer or step made, in points: each with the ends of
    its interval of 95%, paired by prompt.
    """
    rows = []
    tasks = list(dict.fromkeys(prompt["task"] for prompt in prompts))
    for task in [*tasks, *([ALL] if len(tasks) > 1 else [])]:
        of_task = [prompt for prompt in prompts if task in (ALL, prompt["task"])]
        for way in ways:
            name = name_of(way)
            own = name_of(Way("own", 1, way.one_bit, way.budget))
            mine = [prompt for prompt in of_task if name in prompt["scores"]]
            scores = [prompt["scores"] for prompt in mine]
            if not mine:
                continue
            pairs = [(each[name], each["full"]) for each in scores]
            row: dict[str, Any] = {
                "task": task,
                "way": str(way),
                "budget": way.budget or None,
                "n": len(mine),
                "tokens": round(statistics.fmean(prompt["tokens"] for prompt in mine)),
                "answer": round(statistics.fmean(prompt["answer"] for prompt in mine), 1),
                "right": round(100 * statistics.fmean(score for score, _ in pairs), 2),
                "kept": in_percent(of_ratio(pairs)),
                "worse_better": [sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)],
                "same_answers": sum(name in prompt["same"] for prompt in mine),
            }
            if name not in (own, "full") and all(own in each for each in scores):
                to_own = [(each[name], each[own]) for each in scores]
                row["to_own"] = in_percent(of_difference(to_own))
            rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: right answers in %, what is kept of `full`'s, and points to `own`'s."""
    lines = ["| task | budget | way | right | kept | to own | same answers |", "|---" * 7 + "|"]
    for row in rows:
        kept, to_own = (
            f"{each[0]:.1f} [{each[1]:.1f}, {each[2]:.1f}]" if each else "-"
            for each in (row["kept"], row.get("to_own"))
        )
        task = f"{row['task']}, n = {row['n']}"
        cells = (task, row["budget"] or "-", row["way"], f"{row['right']:.1f}", kept, to_own)
        lines.append(f"| {' | '.join(map(str, cells))} | {row['same_answers']} |")
    return "\n".join(lines)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; `each` has the ways at every budget, `full` the first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the folder of a checkpoint")
    add("--out", type=Path, required=True)
    what = "tasks or groups of them, as evaluate takes them; ruler_FILE is one of --ruler"
    add("--tasks", nargs="+", default=["niah_multikey_3"], metavar="TASK", help=what)
    add("--ruler", type=Path, metavar="DIR", help="a folder of RULER's files")
    add("--length", type=int, default=16384, help="tokens of a generated prompt")
    add("--prompts", type=int, default=56, help="of each task")
    add("--budgets", type=int, nargs="+", default=[512, 2048], help="tokens that a step reads")
    add("--ways", nargs="+", default=list(WAYS), metavar="WAY", help="beside `full`")
    add("--seed", type=int, default=0, help="which questions")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, else float32")
    add("--commit", help="what is measured, where the tree is no git checkout")
    add("--time-limit", type=float, default=540, help="seconds: prompts beyond them are left out")
    args = parser.parse_args(argv)
    if min(args.budgets) < RECENT:
        parser.error(f"--budgets: the newest {RECENT} entries are always read")
    try:
        args.each = [Way("full")]
        for budget in dict.fromkeys(args.budgets):
            ways = (Way.parse(name, budget) for name in dict.fromkeys(args.ways))
            args.each += [way for way in ways if way.budget]
    except ValueError as error:
        parser.error(f"--ways: {error}")
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    return args


def head(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The file of a run that has asked nothing yet, or the one that there is.

    Raises:
        SystemExit: the file that there is was made with other settings.
    """
    what = "Answers where decode steps read what another layer or an earlier step chose."
    command = command_line("benchmarks.answers.reuse_answers", argv)
    content: dict[str, Any] = {
        "about": about(what, command, args.commit, ("transformers",)),
        "model": args.model.name,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU",
        "dtype": args.dtype,
        "length": args.length,
        "seed": args.seed,
        "ways": [name_of(way) for way in args.each],
        "rows": [],
        "prompts": [],
        "seconds": 0.0,
    }
    if args.out.exists():
        earlier = read_json(args.out, "benchmarks.answers.reuse_answers", *content)
        same = ("model", "dtype", "length", "seed")
        if other := [key for key in same if earlier[key] != content[key]]:
            sys.exit(f"{args.out} was made with another {', '.join(other)}: name another --out")
        content["prompts"], content["seconds"] = earlier["prompts"], earlier["seconds"]
        # Of ways that this run does not name, too.
        content["ways"] = list(dict.fromkeys([*content["ways"], *earlier["ways"]]))
        content["rows"] = summarise(content["prompts"], ways_of(content))
    return content


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    began = time.monotonic()
    try:
        args.named = tasks_named(args.tasks, ruler_folder=args.ruler)
    except ToolError as error:
        sys.exit(str(error))
    content = head(args, argv)
    model = ReuseModel(args.model, torch.device(args.device), getattr(torch, args.dtype))
    before = content["seconds"]
    cut_off = False
    for asked in prompts_of(args, model.tokenizer, list(content["prompts"])):
        if time.monotonic() - began > args.time_limit:
            cut_off = True
            break
        found = one_prompt(model, asked)
        add(content["prompts"], found)
        elapsed = time.monotonic() - began
        content["rows"] = summarise(content["prompts"], ways_of(content))
        content["seconds"] = round(before + elapsed, 1)
        write_json(args.out, content)
        mean = statistics.fmean(found["scores"].values())
        print(
            f"{asked.task.name} {asked.number}, {found['tokens']} tokens: full "
            f"{found['scores']['full']:.2f}, mean {mean:.2f}, {found['seconds']} s, "
            f"{elapsed:.0f} s in all",
            file=sys.stderr,
            flush=True,
        )
    print(table(content["rows"]))
    if cut_off:
        print("--time-limit: prompts are left, with which the same command goes on", flush=True)
    return 1 if cut_off else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
