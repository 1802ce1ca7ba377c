"""kvpress on the prompts and budgets of `vllm-kvx evaluate`: an outside yardstick for retention.

    python -m benchmarks.answers.kvpress_yardstick run MODEL --shard 1/4 --output shard-1.json
    python -m benchmarks.answers.kvpress_yardstick merge shard-*.json --beside quality.json \\
        --output yardstick.json

kvpress (github.com/NVIDIA/kvpress) runs on transformers, with weights and cache in one process; it
shares no code with this project. A press sees the whole prompt, question and chat template
included, and decoding is greedy, as with our policies.

The file is rewritten after every prompt, one task after another, so that a run that is cut off has
as many prompts of each; a run that finds it goes on from there. `--beside` takes result files of
`vllm-kvx evaluate`, and compares policies and presses that keep as much, prompt by prompt.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.answers.kvpress_presses import (
    FULL,
    KERNEL,
    WINDOW,
    answer_all,
    load_kvpress,
    presses,
)
from benchmarks.common.about import about, command_line
from benchmarks.common.files import read_json

MODULE = "benchmarks.answers.kvpress_yardstick"
BUDGETS = (0.05, 0.1, 0.2, 0.4)
LENGTHS = (4096, 16384)
PACKAGES = ("kvpress", "transformers", "torch")
# Tasks whose prompts come from files, each as long as it is.
FILES = ("ruler_", "longbench_")
TASKS = ("niah_multikey_1", "niah_multikey_2", "niah_multivalue", "several_words")


def cell_name(press: str, budget: float) -> str:
    return f"{press} {budget:g}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file at once: a run that is stopped leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(scratch, path)


def summary(prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each cell's mean over all prompts of a length, with half the width of its 95% interval."""
    scores: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    entries: dict[tuple[int, str], list[float]] = defaultdict(list)
    for prompt in prompts:
        for name, score in prompt["scores"].items():
            scores[prompt["length"], name][prompt["task"]].append(score)
            entries[prompt["length"], name].append(prompt["kept"][name] / prompt["tokens"])
    rows = []
    for (length, name), by_task in scores.items():
        every = [score for of_task in by_task.values() for score in of_task]
        deviation = statistics.stdev(every) if len(every) > 1 else 0.0
        # Against `full` prompt by prompt, which leaves out how hard the prompts are.
        losses = [
            prompt["scores"][FULL] - prompt["scores"][name]
            for prompt in prompts
            if prompt["length"] == length and name in prompt["scores"]
        ]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        rows.append(
            {
                "length": length,
                "press": name.rsplit(" ", 1)[0],
                "budget": float(name.rsplit(" ", 1)[1]) if name != FULL else 1.0,
                "n": len(every),
                "percent": round(100 * statistics.fmean(every), 2),
                "plus_minus": round(196 * deviation / math.sqrt(len(every)), 2),
                "below_full": round(100 * statistics.fmean(losses), 2),
                "below_full_plus_minus": round(196 * spread / math.sqrt(len(losses)), 2),
                "kept": round(statistics.fmean(entries[length, name]), 4),
                "tasks": {
                    task: round(100 * statistics.fmean(of_task), 2)
                    for task, of_task in sorted(by_task.items())
                },
            }
        )
    return sorted(rows, key=lambda row: (row["length"], row["press"] != FULL))


def table(rows: list[dict[str, Any]]) -> str:
    """A line per length and press, a column per budget."""
    lines = []
    for length in sorted({row["length"] for row in rows}):
        at = {(row["press"], row["budget"]): row for row in rows if row["length"] == length}
        budgets = sorted({budget for press, budget in at if press != FULL})
        whole = at[FULL, 1.0]
        lines += [
            f"{length} tokens, n = {whole['n']}, full {whole['percent']:.1f}",
            f"{'press':20}" + "".join(f"{f'{100 * budget:g}%':>14}" for budget in budgets),
        ]
        for press in dict.fromkeys(press for press, _ in at if press != FULL):
            row = f"{press:20}"
            for budget in budgets:
                cell = at.get((press, budget))
                text = f"{cell['percent']:.1f} ± {cell['plus_minus']:.1f}" if cell else "-"
                row += f"{text:>14}"
            lines.append(row)
    return "\n".join(lines)


def run_at_once(args: argparse.Namespace) -> None:
    """Several processes side by side, each with its part of the prompts and a file of its own."""
    shards = [f"{number}/{args.at_once}" for number in range(1, args.at_once + 1)]
    given = [sys.executable, "-m", MODULE, *sys.argv[1:], "--at-once", "1"]
    outputs = [
        args.output.with_stem(f"{args.output.stem}-{number}")
        for number in range(1, args.at_once + 1)
    ]
    running = [
        subprocess.Popen([*given, "--shard", shard, "--output", str(output)])
        for shard, output in zip(shards, outputs, strict=True)
    ]
    failed = [process.wait() for process in running]
    if any(failed):
        sys.exit(f"of the processes for {', '.join(shards)} the exits were {failed}")


def prompts_of(args: argparse.Namespace) -> dict[Any, Any]:
    """The prompts of `vllm-kvx evaluate` with the same options, by question: of each task one, then
    of each the next.
    """
    from vllm_kvx.tools.evaluate.questions import Suite, load_tokenizer

    suite = Suite.of(
        args.tasks,
        args.longbench,
        args.ruler,
        lengths=tuple(args.lengths),
        samples=args.samples,
        seed=args.seed,
    )
    prepared = suite.prepare(partial(load_tokenizer, args.model, None), lambda *_: None)
    return dict(sorted(prepared.items(), key=lambda each: (each[0].length, each[0].index)))


@torch.no_grad()  # Not inference mode: KVgrad takes gradients of the cached entries.
def run(args: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM

    from vllm_kvx.tools.evaluate.questions import load_tokenizer

    args.presses = args.presses or list(presses())
    if unknown := set(args.presses) - set(presses()):
        sys.exit(f"unknown presses {sorted(unknown)}; known are {', '.join(presses())}")
    if args.at_once > 1:
        return run_at_once(args)
    names = [cell_name(press, budget) for budget in args.budgets for press in args.presses]
    prompts = prompts_of(args)
    tokenizer = load_tokenizer(args.model, None)
    load_kvpress()  # Before the model: it replaces transformers' attention functions.
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa"
    )
    model = model.to(args.device).eval()
    config = model.config
    if getattr(config, "head_dim", None) is None:  # CriticalKV's press reads it there.
        config.head_dim = config.hidden_size // config.num_attention_heads
    ends = model.generation_config.eos_token_id
    stop = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    settings = {
        "model": Path(args.model).name,
        "presses": args.presses,
        "budgets": args.budgets,
        "window": WINDOW,
        "kernel": KERNEL,
        "seed": args.seed,
        "samples": args.samples,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        **{name: version(name) for name in PACKAGES},
    }
    head = about(
        "kvpress's presses on the prompts of `vllm-kvx evaluate`.",
        command_line(MODULE, sys.argv[1:]),
        args.commit,
        PACKAGES,
    )
    content: dict[str, Any] = {"about": head, "settings": settings, "prompts": []}
    if args.output.exists():
        content = json.loads(args.output.read_text())
        if content["settings"] != settings:
            sys.exit(f"{args.output} was made with other settings: name another --output")
    done = {(p["length"], p["task"], p["index"]) for p in content["prompts"]}
    shard, shards = args.shard
    todo = list(prompts.items())[shard - 1 :: shards]
    end = time.monotonic() + (args.time_limit or math.inf)
    left = ""
    for count, (question, prepared) in enumerate(todo, 1):
        if (question.length, question.task, question.index) in done:
            continue
        if time.monotonic() > end:
            left = f"--time-limit: of {len(todo)} prompts the last were not asked, from {count} on"
            break
        began = time.perf_counter()
        token_ids = list(prepared.prompt.token_ids)
        answers = answer_all(model, token_ids, names, prepared.prompt.max_tokens, stop)
        texts = {
            cell: tokenizer.decode(answer.tokens, skip_special_tokens=True)
            for cell, answer in answers.items()
        }
        content["prompts"].append(
            {
                "length": question.length,
                "task": question.task,
                "index": question.index,
                "tokens": len(token_ids),
                "seconds": round(time.perf_counter() - began, 2),
                "kept": {cell: round(answer.entries, 2) for cell, answer in answers.items()},
                "scores": {cell: round(prepared.score(text, 0), 4) for cell, text in texts.items()},
                "answers": texts,
            }
        )
        write_json(args.output, content)
        scores = content["prompts"][-1]["scores"]
        print(
            f"{count}/{len(todo)} {question.length} {question.task} {question.index}: "
            f"full {scores[FULL]:.2f}, presses "
            f"{statistics.fmean(scores.values()):.2f}, {content['prompts'][-1]['seconds']} s",
            flush=True,
        )
    if content["prompts"]:
        print(table(summary(content["prompts"])))
    if left:
        sys.exit(f"{left}: the same command goes on with them")


def merge(args: argparse.Namespace) -> None:
    """One file of all shards: each model's table, and each prompt's scores."""
    models: dict[str, Any] = {}
    shards = [read_json(path, f"{MODULE} run", "settings", "prompts") for path in args.files]
    for path, shard in zip(args.files, shards, strict=True):
        settings = shard["settings"]
        one = models.setdefault(settings["model"], {"settings": settings, "prompts": []})
        if one["settings"] != settings:
            sys.exit(f"{path} was made with other settings than the files before it")
        one["prompts"] += shard["prompts"]
    for name, one in models.items():
        # A run that went on with another number of processes asked some prompts twice.
        asked: dict[Any, Any] = {}
        for prompt in one["prompts"]:
            asked.setdefault((prompt["length"], prompt["task"], prompt["index"]), prompt)
        one["prompts"] = list(asked.values())
        one["cells"] = summary(one["prompts"])
        for prompt in one["prompts"]:
            del prompt["answers"], prompt["kept"], prompt["seconds"]
        print(f"{name}\n{table(one['cells'])}")
        if args.beside:
            reports = [
                read_json(path, "vllm-kvx evaluate", "model", "scores") for path in args.beside
            ]
            one["beside"] = beside(one["prompts"], [r for r in reports if r["model"] == name])
            print("\n".join(map(line_of, one["beside"])))
    if args.output:
        heads = [shard["about"] for shard in shards if "about" in shard]
        known: dict[str, Any] = {
            key: heads[-1][key] if heads else None
            for key in ("date", "commit", "device", "versions")
        }
        what = "kvpress's presses on the prompts of `vllm-kvx evaluate`."
        head = about(what, [each["command"] for each in heads], **known)
        write_json(args.output, {"about": head, "models": models})


def beside(prompts: list[dict[str, Any]], reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Presses against the policies that keep as much, over the prompts that both answered.

    reports: results of `vllm-kvx evaluate`. by: the press's mean score less the policy's, in
    points, with the interval of a paired bootstrap. differ: on how many prompts the two differ.
    """
    from benchmarks.answers.pooled import scores_by_policy
    from vllm_kvx.tools.evaluate.intervals import of_difference

    rows = []
    for report in reports:
        ours = scores_by_policy(report)
        for length, name in dict.fromkeys((p["length"], n) for p in prompts for n in p["scores"]):
            press, _, budget = name.partition(" ")
            for policy, scores in ours.items():
                parts = re.split("[:,+]", policy)
                if FULL not in parts if name == FULL else f"kv_rate={budget}" not in parts:
                    continue
                pairs = [
                    (prompt["scores"][name], scores[key])
                    for prompt in prompts
                    if prompt["length"] == length and name in prompt["scores"]
                    # A file's prompts are as long as they are, whatever length had room for them.
                    for key in scores
                    if key[0] == prompt["task"]
                    and key[2] == prompt["index"]
                    and (key[1] == length or key[0].startswith(FILES))
                ]
                if pairs:
                    by = of_difference(pairs)
                    rows.append(
                        {
                            "length": length,
                            "press": press,
                            "budget": float(budget or 1),
                            "policy": policy,
                            "n": len(pairs),
                            "differ": sum(theirs != own for theirs, own in pairs),
                            "press_percent": round(100 * statistics.fmean(a for a, _ in pairs), 2),
                            "policy_percent": round(100 * statistics.fmean(b for _, b in pairs), 2),
                            "by": [round(100 * value, 2) for value in by],
                        }
                    )
    return rows


def line_of(row: dict[str, Any]) -> str:
    """A row of `beside` for a reader."""
    value, low, high = row["by"]
    return (
        f"{row['length']} {row['press']} {row['budget']:g}: {row['press_percent']:.1f}, "
        f"{row['policy']} {row['policy_percent']:.1f}: {value:+.1f} [{low:.1f} to {high:.1f}], "
        f"n {row['n']}, {row['differ']} differ"
    )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    def numbers(kind: type) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",")]

    def shard(text: str) -> tuple[int, int]:
        number, count = map(int, text.split("/"))
        if not 1 <= number <= count:
            raise ValueError
        return number, count

    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="answers of one model under every press")
    command.set_defaults(run=run)
    add = command.add_argument
    add("model", help="directory or Hugging Face hub name")
    add("--lengths", type=numbers(int), default=list(LENGTHS), help="tokens of a prompt")
    add("--seed", type=int, default=0, help="which questions")
    add("--tasks", type=numbers(str), default=list(TASKS))
    add("--samples", type=int, default=13, help="of each task")
    add("--longbench", help="folder of LongBench's files, for tasks named longbench_...")
    add("--ruler", help="folder of RULER's files, for tasks named ruler_...")
    add("--presses", type=numbers(str), help="default: all")
    add("--budgets", type=numbers(float), default=list(BUDGETS))
    add("--time-limit", type=float, metavar="S", help="after which no prompt is begun")
    add("--shard", type=shard, default=(1, 1), metavar="I/N", help="every Nth prompt from the Ith")
    add("--at-once", type=int, default=1, metavar="N", help="processes; each writes OUTPUT-I.json")
    add("--output", type=Path, required=True)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", default="bfloat16")
    add("--commit", help="of this code, where there is no checkout")
    command = commands.add_parser("merge", help="one file and its tables, of all shards")
    command.set_defaults(run=merge)
    command.add_argument("files", type=Path, nargs="+")
    command.add_argument("--output", type=Path)
    command.add_argument(
        "--beside", type=Path, nargs="+", help="results of `vllm-kvx evaluate` to compare with"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = parse_args()
    arguments.run(arguments)
