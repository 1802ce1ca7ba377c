"""kvpress on the prompts and budgets of `vllm-kvx evaluate`: an outside yardstick for retention.

    python -m benchmarks.answers.kvpress_yardstick run MODEL --shard 1/4 --output shard-1.json
    python -m benchmarks.answers.kvpress_yardstick merge shard-*.json --output yardstick.json

kvpress (github.com/NVIDIA/kvpress) runs on transformers, with weights and cache in one process; it
shares no code with this project. A press sees the whole prompt, question and chat template
included, and decoding is greedy, as with our policies.

The file is rewritten after every prompt; a run that finds it goes on from there.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
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

BUDGETS = (0.05, 0.1, 0.2, 0.4)
LENGTHS = (4096, 16384)
PACKAGES = ("kvpress", "transformers", "torch")
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


@torch.inference_mode()
def run(args: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_kvx.tools.tasks.prompts import fitted
    from vllm_kvx.tools.tasks.table import TASKS as BY_NAME

    names = [cell_name(press, budget) for budget in args.budgets for press in args.presses]
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
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
        "max_tokens": args.max_tokens,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        **{name: version(name) for name in PACKAGES},
    }
    content: dict[str, Any] = {"settings": settings, "prompts": []}
    if args.output.exists():
        content = json.loads(args.output.read_text())
        if content["settings"] != settings:
            sys.exit(f"{args.output} was made with other settings: name another --output")
    done = {(p["length"], p["task"], p["index"]) for p in content["prompts"]}
    shard, shards = args.shard
    todo = [
        (length, BY_NAME[args.tasks[number % len(args.tasks)]], number // len(args.tasks))
        for length in args.lengths
        for number in range(args.prompts)
        if number % shards == shard - 1
    ]
    for count, (length, task, index) in enumerate(todo, 1):
        if (length, task.name, index) in done:
            continue
        began = time.perf_counter()
        prompt = fitted(task, f"{args.seed}-{task.name}-{index}", length, tokenizer)
        max_tokens = min(args.max_tokens or task.max_tokens, task.max_tokens)
        answers = answer_all(model, list(prompt.token_ids), names, max_tokens, stop)
        texts = {
            name: tokenizer.decode(answer.tokens, skip_special_tokens=True)
            for name, answer in answers.items()
        }
        content["prompts"].append(
            {
                "length": length,
                "task": task.name,
                "index": index,
                "tokens": len(prompt.token_ids),
                "seconds": round(time.perf_counter() - began, 2),
                "kept": {name: round(answer.entries, 2) for name, answer in answers.items()},
                "scores": {
                    name: round(task.score(text, prompt.sample), 4) for name, text in texts.items()
                },
                "answers": texts,
            }
        )
        write_json(args.output, content)
        scores = content["prompts"][-1]["scores"]
        print(
            f"{count}/{len(todo)} {length} {task.name} {index}: full {scores[FULL]:.2f}, presses "
            f"{statistics.fmean(scores.values()):.2f}, {content['prompts'][-1]['seconds']} s",
            flush=True,
        )
    if content["prompts"]:
        print(table(summary(content["prompts"])))


def merge(args: argparse.Namespace) -> None:
    """One file of all shards: each model's table, and each prompt's scores."""
    models: dict[str, Any] = {}
    for path in args.files:
        shard = json.loads(path.read_text())
        settings = shard["settings"]
        one = models.setdefault(settings["model"], {"settings": settings, "prompts": []})
        if one["settings"] != settings:
            sys.exit(f"{path} was made with other settings than the files before it")
        for prompt in shard["prompts"]:
            del prompt["answers"], prompt["kept"], prompt["seconds"]
            one["prompts"].append(prompt)
    for name, one in models.items():
        shards = [json.loads(path.read_text()) for path in args.files]
        every = [p for s in shards if s["settings"]["model"] == name for p in s["prompts"]]
        one["cells"] = summary(every)
        print(f"{name}\n{table(one['cells'])}")
    if args.output:
        commands = [
            command_line("benchmarks.answers.kvpress_yardstick", ["run", name]) for name in models
        ]
        # What ran where and when is in the shards' settings.
        last = next(reversed(models.values()))["settings"]
        known = {"device": last.get("device"), "versions": {key: last.get(key) for key in PACKAGES}}
        what = "kvpress's methods on the prompts of `vllm-kvx evaluate`."
        head = about(what, commands, **known)
        write_json(args.output, {"about": head, "models": models})


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    def numbers(kind: type) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",")]

    def shard(text: str) -> tuple[int, int]:
        number, count = map(int, text.split("/"))
        if not 1 <= number <= count:
            raise ValueError
        return number, count

    parser = argparse.ArgumentParser(
        prog="benchmarks.answers.kvpress_yardstick", description=__doc__.split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="answers of one model under every press")
    command.set_defaults(run=run)
    add = command.add_argument
    add("model", help="directory or Hugging Face hub name")
    add("--lengths", type=numbers(int), default=list(LENGTHS), help="tokens of a prompt")
    add("--seed", type=int, default=0, help="which questions")
    add("--tasks", type=numbers(str), default=list(TASKS))
    add("--prompts", type=int, default=52, help="per length, spread over the tasks")
    add("--presses", type=numbers(str), help="default: all")
    add("--budgets", type=numbers(float), default=list(BUDGETS))
    add("--max-tokens", type=int, help="of an answer; default: the task's")
    add("--shard", type=shard, default=(1, 1), metavar="I/N", help="every Nth prompt from the Ith")
    add("--output", type=Path, required=True)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", default="bfloat16")
    command = commands.add_parser("merge", help="one file and its tables, of all shards")
    command.set_defaults(run=merge)
    command.add_argument("files", type=Path, nargs="+")
    command.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if args.command == "run":
        known = presses()
        args.presses = args.presses or list(known)
        if unknown := set(args.presses) - set(known):
            parser.error(f"unknown presses {sorted(unknown)}; known are {', '.join(known)}")
    return args


if __name__ == "__main__":
    arguments = parse_args()
    arguments.run(arguments)
