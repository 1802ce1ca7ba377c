"""kvpress on the prompts and budgets of `vllm-kvx evaluate`: an outside yardstick for retention.

    python -m benchmarks.kvpress_yardstick run MODEL --shard 1/4 --output shard-1.json
    python -m benchmarks.kvpress_yardstick merge shard-*.json --output kvpress-yardstick.json

kvpress (github.com/NVIDIA/kvpress) runs on transformers, with weights and cache in one process; it
shares no code with this project. A press sees the whole prompt, question and chat template
included, and decoding is greedy, as with our policies.

A press does not change what prefill computes: it chooses entries once a layer's attention is done.
So each prompt is prefilled once, every press compresses the same keys and values, and the caches
are decoded together as one batch. The presses are kvpress' own, but for those named `our-...`,
which score as this project does: they tell a difference between two programs from one between two
scores. kvpress' SnapKV takes means where ours takes maxima of neighbours and sums.

The file is rewritten after every prompt; a run that finds it goes on from there.
"""

import argparse
import importlib
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BUDGETS = (0.05, 0.1, 0.2, 0.4)
LENGTHS = (4096, 16384)
TASKS = ("niah_multikey_1", "niah_multikey_2", "niah_multivalue", "several_words")
FULL = "full"
WINDOW, KERNEL = 8, 7  # The papers' and this project's; kvpress has 64 and 5.


def load_kvpress() -> ModuleType:
    """kvpress; where one of its needs that no press here uses is missing, a stand-in for that.

    kvpress imports `datasets` and `requests` for presses that fetch statistics.
    """
    import transformers  # noqa: F401  # It looks for `datasets` and must not see the stand-in.

    stand_ins = []
    for name, attribute in (("datasets", "load_dataset"), ("requests", "get")):
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = ModuleType(name)
            setattr(sys.modules[name], attribute, None)
            stand_ins.append(name)
    try:
        return importlib.import_module("kvpress")
    except ImportError as error:
        sys.exit(
            f"kvpress cannot be imported: {error}\n"
            "pip install --no-deps kvpress cachetools fire termcolor"
        )
    finally:
        for name in stand_ins:
            del sys.modules[name]


# What makes a press. The budget is set for each prompt.
Maker = Callable[[], Any]


@cache
def presses() -> dict[str, Maker]:
    """Every press by name. `our-` marks those that score as this project does."""
    kv: Any = load_kvpress()

    class OurSnap(kv.SnapKVPress):  # type: ignore[misc]
        """This project's saliency: fp32 rows summed, then max-pooled, then summed over heads.

        Means in place of the sums keep the order, and kvpress' scale, which CriticalKV needs.
        """

        def score(  # type: ignore[no-untyped-def]
            self, module, hidden_states, keys, values, attentions, kwargs
        ) -> Tensor:
            # [1, H, w, N - w], the rows normalised over all N keys.
            rows = self.compute_window_attention(
                module,
                hidden_states,
                keys.float(),
                self.window_size,
                tuple(part.float() for part in kwargs["position_embeddings"]),
            )
            pooled = F.max_pool1d(rows.mean(-2), self.kernel_size, 1, self.kernel_size // 2)
            scores = pooled.unflatten(1, (keys.shape[1], -1)).mean(2)  # [1, G, N - w]
            return F.pad(scores, (0, self.window_size), value=scores.max().item() + 1)

    def snapkv(window: int = WINDOW, kernel: int = KERNEL) -> Any:
        return kv.SnapKVPress(window_size=window, kernel_size=kernel)

    def ours(window: int = WINDOW) -> Any:
        return OurSnap(window_size=window, kernel_size=KERNEL)

    return {
        "snapkv": snapkv,
        "streamingllm": kv.StreamingLLMPress,
        "knorm": kv.KnormPress,
        "pyramidkv": lambda: kv.PyramidKVPress(window_size=WINDOW, kernel_size=KERNEL),
        "snapkv-defaults": lambda: kv.SnapKVPress(),
        "ada": lambda: kv.AdaKVPress(snapkv()),
        "critical": lambda: kv.CriticalKVPress(snapkv()),
        "critical-ada": lambda: kv.CriticalAdaKVPress(snapkv()),
        "our-snapkv": ours,
        "our-ada": lambda: kv.AdaKVPress(ours()),
        "our-critical": lambda: kv.CriticalKVPress(ours()),
        "our-critical-ada": lambda: kv.CriticalAdaKVPress(ours()),
        "snapkv-window-16": lambda: snapkv(16),
        "snapkv-window-32": lambda: snapkv(32),
        "our-window-16": lambda: ours(16),
        "our-window-32": lambda: ours(32),
    }


@dataclass
class Kept:
    """What one press at one budget keeps of one prompt.

    layers: (keys, values) of every layer, each [1, G, n, head size].
    masked: of every layer, the entries that presses with a budget per head hide from attention.
    """

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    masked: list[tuple[Tensor, Tensor, Tensor] | None] = field(default_factory=list)

    def entries(self) -> float:
        """Entries that attention reads, per layer and KV head on average."""
        total = sum(keys.shape[1] * keys.shape[2] for keys, _ in self.layers)
        hidden = sum(len(masked[0]) for masked in self.masked if masked is not None)
        return (total - hidden) / sum(keys.shape[1] for keys, _ in self.layers)


@contextmanager
def compressing(model: Any, cells: dict[str, Any]) -> Iterator[dict[str, Kept]]:
    """Within, a prefill fills one `Kept` per press in `cells`; its own cache stays whole."""
    kept = {name: Kept() for name in cells}

    def after_attention(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        for name, press in cells.items():
            module.masked_key_indices = None
            # Of the attention weights, sdpa returns none.
            pair = press.compress(
                module, kwargs["hidden_states"], layer.keys, layer.values, None, kwargs
            )
            kept[name].layers.append(pair)
            kept[name].masked.append(module.masked_key_indices)
        module.masked_key_indices = None

    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(after_attention, with_kwargs=True))
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def batched(model: Any, batch: list[Kept]) -> Any:
    """The caches of several presses as one, of as many entries as the greatest in each layer.

    What a smaller one lacks is filled up and hidden in the way that kvpress hides entries: its
    patched attention gives the places in `masked_key_indices` keys of no weight.
    """
    from transformers import DynamicCache

    past = DynamicCache()
    for index, layer in enumerate(model.model.layers):
        longest = max(kept.layers[index][0].shape[2] for kept in batch)
        filled: list[tuple[Tensor, Tensor]] = []
        masked: list[tuple[Tensor, ...]] = []
        for number, kept in enumerate(batch):
            keys, values = kept.layers[index]
            _, heads, size, _ = keys.shape
            lack = longest - size
            filled.append((F.pad(keys, (0, 0, 0, lack)), F.pad(values, (0, 0, 0, lack))))
            if (found := kept.masked[index]) is not None:
                masked.append((found[0] + number, found[1], found[2]))
            if lack:
                of_head = torch.arange(heads).repeat_interleave(lack)
                places = torch.arange(size, longest).repeat(heads)
                masked.append((torch.full_like(places, number), of_head, places))
        keys, values = (torch.cat(parts) for parts in zip(*filled, strict=True))
        past.update(keys, values, index)
        layer.self_attn.masked_key_indices = (
            tuple(
                torch.cat([part.to(keys.device) for part in parts])
                for parts in zip(*masked, strict=True)
            )
            if masked
            else None
        )
    return past


def decode(
    model: Any, batch: list[Kept], first: int, position: int, max_tokens: int, stop: set[int]
) -> list[list[int]]:
    """Greedy answers over the caches of several presses, all at once.

    first: the answer's first token, which prefill gave. position: where it stands.
    """
    past = batched(model, batch)
    answers = [[first] for _ in batch]
    try:
        for step in range(max_tokens - 1):
            if all(answer[-1] in stop for answer in answers):
                break
            logits = model(
                input_ids=torch.tensor([answer[-1:] for answer in answers], device=model.device),
                past_key_values=past,
                position_ids=torch.full((len(batch), 1), position + step, device=model.device),
            ).logits
            for answer, token in zip(answers, logits[:, -1].argmax(-1).tolist(), strict=True):
                answer.append(answer[-1] if answer[-1] in stop else token)
    finally:
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
    return answers


@dataclass
class Answered:
    """tokens: the answer. entries: kept per layer and KV head, on average."""

    tokens: list[int]
    entries: float


def answer_all(
    model: Any, token_ids: list[int], names: Iterable[str], max_tokens: int, stop: set[int]
) -> dict[str, Answered]:
    """What the model answers under every press and budget of `names`, and with all entries."""
    from transformers import DynamicCache

    length, cells = len(token_ids), {}
    for name in names:
        press, budget = name.rsplit(" ", 1)
        cells[name] = presses()[press]()
        # The middle between two counts, so that kvpress' rounding gives int(N * rate), as ours.
        cells[name].compression_ratio = 1 - (int(length * float(budget)) + 0.5) / length
    past: Any = DynamicCache()
    with compressing(model, cells) as kept:
        logits = model(
            input_ids=torch.tensor([token_ids], device=model.device),
            past_key_values=past,
            logits_to_keep=1,
        ).logits
    first = int(logits[0, -1].argmax())
    whole = [(layer.keys, layer.values) for layer in past.layers]
    kept[FULL] = Kept(whole, [None] * len(whole))
    entries = {name: of_press.entries() for name, of_press in kept.items()}
    # Presses with a budget per head hide entries and remove none.
    removing = [name for name in kept if kept[name].layers[-1][0].shape[2] < length]
    answers: dict[str, list[int]] = {}
    waiting = [removing, [name for name in kept if name not in removing]]
    while waiting:
        together = waiting.pop()
        if not together:
            continue
        some = [kept[name] for name in together]
        try:
            found = decode(model, some, first, length, max_tokens, stop)
        except ValueError:
            # kvpress found no key that every query head ignores, in some of these.
            if len(together) > 1:
                half = len(together) // 2
                waiting += [together[:half], together[half:]]
            continue
        answers.update(zip(together, found, strict=True))
    return {name: Answered(tokens, entries[name]) for name, tokens in answers.items()}


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

    from vllm_kvx.evaluation.prompts import fitted
    from vllm_kvx.evaluation.tasks.table import TASKS as BY_NAME

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
    about = {
        "model": Path(args.model).name,
        "presses": args.presses,
        "budgets": args.budgets,
        "window": WINDOW,
        "kernel": KERNEL,
        "seed": args.seed,
        "max_tokens": args.max_tokens,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        **{name: version(name) for name in ("kvpress", "transformers", "torch")},
    }
    content: dict[str, Any] = {"about": about, "prompts": []}
    if args.output.exists():
        content = json.loads(args.output.read_text())
        if content["about"] != about:
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
        one = models.setdefault(shard["about"]["model"], {"about": shard["about"], "prompts": []})
        if one["about"] != shard["about"]:
            sys.exit(f"{path} was made with other settings than the files before it")
        for prompt in shard["prompts"]:
            del prompt["answers"], prompt["kept"], prompt["seconds"]
            one["prompts"].append(prompt)
    for name, one in models.items():
        shards = [json.loads(path.read_text()) for path in args.files]
        every = [p for s in shards if s["about"]["model"] == name for p in s["prompts"]]
        one["cells"] = summary(every)
        print(f"{name}\n{table(one['cells'])}")
    if args.output:
        write_json(args.output, {"models": models})


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    def numbers(kind: type) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",")]

    def shard(text: str) -> tuple[int, int]:
        number, count = map(int, text.split("/"))
        if not 1 <= number <= count:
            raise ValueError
        return number, count

    parser = argparse.ArgumentParser(
        prog="benchmarks.kvpress_yardstick", description=__doc__.split("\n")[0]
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
