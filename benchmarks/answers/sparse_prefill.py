"""What share of answers a prefill keeps that attends to chosen blocks of keys alone.

    python -m benchmarks.answers.sparse_prefill --model DIR --out NAME.json --lengths 16384

Every prompt is prefilled in full (`dense`) and under each setting of ``benchmarks.ops.
prefill_blocks``, then answered greedily; decode reads all entries. Prompts are lookups of
``vllm_kvx.tools.tasks`` at the given lengths, and with `--ruler` those of a file of RULER's. Of the
first prompts of a length also how much of a dense prefill's attention each setting would read.

The file is rewritten after every prompt; a run that finds it goes on from there. The exit status is
1 while prompts are left.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.answers.sparse_model import DENSE, SparseModel
from benchmarks.common.about import about, command_line
from benchmarks.common.files import write_json
from benchmarks.ops.prefill_blocks import Setting
from vllm_kvx.tools.evaluate.intervals import of_kept
from vllm_kvx.tools.tasks.base import FixedTask, Task
from vllm_kvx.tools.tasks.prompts import EncodedSample, encode, fitted
from vllm_kvx.tools.tasks.ruler_files import PREFIX, RulerFile
from vllm_kvx.tools.tasks.table import GROUPS, TASKS

COVERS = (0.9, 0.95, 0.98)
WAYS = ("antidiagonal", "pooled", "one_bit", "oracle")
SETTINGS = tuple(f"{way}:cover={share}" for way in WAYS for share in COVERS)
Prompt = dict[str, Any]


class Asked(NamedTuple):
    """A prompt of a group, a length or a file, with its number there and its task."""

    group: str
    number: int
    task: Task | FixedTask
    encoded: EncodedSample


def prompts_of(args: argparse.Namespace, tokenizer: Any, done: set[Any]) -> Iterator[Asked]:
    """Lengths take turns, and in each of them tasks; then the file's. Those done are left out."""
    for number in range(args.prompts):
        for length in args.lengths:
            task = TASKS[args.tasks[number % len(args.tasks)]]
            if (str(length), number) not in done:
                seed = f"sparse prefill {args.seed} {number} {task.name}"
                yield Asked(str(length), number, task, fitted(task, seed, length, tokenizer))
    if args.ruler:
        of_file = RulerFile(PREFIX + args.ruler.stem, args.ruler)
        for number, sample in enumerate(of_file.samples()[: args.ruler_prompts]):
            if (of_file.name, number) not in done:
                yield Asked(of_file.name, number, of_file, encode(sample, tokenizer))


def one_prompt(
    model: SparseModel, asked: Asked, named: Mapping[str, Setting], recalled: bool
) -> Prompt:
    """Scores and shares of blocks read by setting, `dense` among them."""
    began = time.perf_counter()
    ids = asked.encoded.token_ids
    every = {"dense": DENSE, **named}
    answers, reads = model.answers(ids, list(every.values()), asked.task.max_tokens)
    texts = [model.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
    scores = [asked.task.score(text, asked.encoded.sample) for text in texts]
    found: Prompt = {
        "group": asked.group,
        "number": asked.number,
        "task": asked.task.name,
        "tokens": len(ids),
        "scores": {name: round(s, 4) for name, s in zip(every, scores, strict=True)},
        "same": [n for n, tokens in zip(every, answers, strict=True) if tokens == answers[0]],
        "shares": {n: round(r.share, 5) for n, r in zip(every, reads, strict=True)},
        "most": {n: r.most for n, r in zip(every, reads, strict=True)},
        "layers": {
            n: [round(x, 4) for x in r.by_layer]
            for n, r in zip(every, reads, strict=True)
            if n != "dense"
        },
    }
    if recalled:
        values = model.recall(ids, list(named.values()))
        found["recall"] = {
            name: {key: round(x, 5) for key, x in values[setting].items()}
            for name, setting in named.items()
        }
    return found | {"seconds": round(time.perf_counter() - began, 2)}


def summarise(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """A row for each length or file and setting: right answers in %, and what `dense` keeps."""
    rows = []
    groups = {prompt["group"]: None for prompt in prompts}
    for group in groups:
        mine = [prompt for prompt in prompts if prompt["group"] == group]
        for name in mine[0]["scores"]:
            pairs = [(p["scores"][name], p["scores"]["dense"]) for p in mine]
            kept = of_kept(pairs)
            row: dict[str, Any] = {
                "group": group,
                "setting": name,
                "n": len(mine),
                "tokens": round(statistics.fmean(p["tokens"] for p in mine)),
                "right": round(100 * statistics.fmean(own for own, _ in pairs), 2),
                "kept": kept and [round(100 * x, 2) for x in kept],
                "worse_better": [sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)],
                "same_answers": sum(name in p["same"] for p in mine),
                "share": round(statistics.fmean(p["shares"][name] for p in mine), 4),
                "most": max(p["most"][name] for p in mine),
            }
            if name != "dense":
                by_layer = zip(*(p["layers"][name] for p in mine), strict=True)
                row["layers"] = [round(statistics.fmean(layer), 3) for layer in by_layer]
                known = [p["recall"][name] for p in mine if "recall" in p]
                if known:
                    row["recall_n"] = len(known)
                    row["recall"] = {
                        key: round(statistics.fmean(each[key] for each in known), 4)
                        for key in known[0]
                    }
            rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, in %: answers, what is kept of the dense ones, blocks read, attention found."""
    lines = [
        "| prompts | setting | right | kept of dense | blocks read | attention (5%; last block) |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        kept = "-"
        if row["kept"]:
            value, low, high = row["kept"]
            kept = f"{value:.1f} ({low:.1f} to {high:.1f})"
        found = row.get("recall")
        held = "-"
        if found:
            mass, low, last = (100 * found[key] for key in ("mass", "low", "last"))
            held = f"{mass:.1f} ({low:.1f}; {last:.1f})"
        prompts = f"{row['group']}, n = {row['n']}"
        cells = (prompts, row["setting"], f"{row['right']:.1f}", kept, f"{100 * row['share']:.1f}")
        lines.append(f"| {' | '.join((*cells, held))} |")
    return "\n".join(lines)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; `tasks` without groups, and `named` has the settings by name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the folder of a checkpoint")
    add("--out", type=Path, required=True)
    add("--lengths", type=int, nargs="*", default=[8192, 16384, 30720], help="of its prompts")
    choices = sorted([*TASKS, *(name for name, each in GROUPS.items() if TASKS.keys() >= {*each})])
    what = f"tasks or groups of them: {', '.join(choices)}"
    add("--tasks", nargs="+", choices=choices, default=["lookups"], metavar="TASK", help=what)
    add("--prompts", type=int, default=56, help="for each length")
    add("--ruler", type=Path, help="a file of RULER's prompts, named after its task")
    add("--ruler-prompts", type=int, default=100, help="the first of the file")
    add("--settings", nargs="+", default=SETTINGS, help="method:parameter=value,...")
    add("--recall-prompts", type=int, default=3, help="of each length, the first")
    add("--seed", type=int, default=0, help="which questions")
    add("--commit", help="what is measured, where the tree is no git checkout")
    add("--time-limit", type=float, default=540, help="seconds: prompts beyond them are left out")
    args = parser.parse_args(argv)
    args.tasks = [task for name in args.tasks for task in GROUPS.get(name, (name,))]
    try:
        args.named = {name: Setting.parse(name) for name in args.settings}
    except ValueError as error:
        parser.error(f"--settings: {error}")
    return args


def check_tasks(args: argparse.Namespace, prompts: Sequence[Prompt]) -> None:
    """Raises SystemExit where a file's prompts are of other tasks than this run's."""
    made = [prompt for prompt in prompts if prompt["group"].isdigit()]
    for prompt in made:
        if prompt["task"] != args.tasks[prompt["number"] % len(args.tasks)]:
            sys.exit(f"{args.out} was made with other --tasks: name another --out")


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    named: dict[str, Setting] = args.named
    if args.ruler and not args.ruler.is_file():
        sys.exit(f"--ruler: there is no file {args.ruler}")
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # On a CPU, what runs is small.
    # Exact for products of bfloat16; estimates are float32.
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = SparseModel(args.model, device, dtype)
    what = "Answers, blocks read and attention found, where prefill reads chosen blocks of keys."
    content: dict[str, Any] = {
        "about": about(
            what,
            command_line("benchmarks.answers.sparse_prefill", argv),
            args.commit,
            ("transformers",),
        ),
        "model": args.model.name,
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "settings": list(named),
        "seed": args.seed,
        "rows": [],
        "prompts": [],
        "seconds": 0.0,
    }
    if args.out.exists():
        earlier = json.loads(args.out.read_text(encoding="utf-8"))
        same = ("model", "dtype", "settings", "seed")
        if any(earlier[key] != content[key] for key in same):
            sys.exit(f"{args.out} was made with other settings: name another --out")
        check_tasks(args, earlier["prompts"])
        content["prompts"], content["seconds"] = earlier["prompts"], earlier["seconds"]
    before = content["seconds"]
    done = {(prompt["group"], prompt["number"]) for prompt in content["prompts"]}
    cut_off = False
    for asked in prompts_of(args, model.tokenizer, done):
        if time.monotonic() - began > args.time_limit:
            cut_off = True
            break
        found = one_prompt(model, asked, named, asked.number < args.recall_prompts)
        content["prompts"].append(found)
        elapsed = time.monotonic() - began
        content["rows"] = summarise(content["prompts"])
        content["seconds"] = round(before + elapsed, 1)
        write_json(args.out, content)
        right = sum(found["scores"].values()) / len(found["scores"])
        print(
            f"{asked.group} {asked.number} {asked.task.name}: "
            f"dense {found['scores']['dense']:.2f}, mean {right:.2f}, "
            f"{found['seconds']} s, {elapsed:.0f} s in all",
            file=sys.stderr,
            flush=True,
        )
    if content["prompts"]:
        print(table(summarise(content["prompts"])))
    if cut_off:
        print("--time-limit: prompts are left, with which the same command goes on", flush=True)
    return 1 if cut_off else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
