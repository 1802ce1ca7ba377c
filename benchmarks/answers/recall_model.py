"""The recall table of a real checkpoint: which reduction finds what its decode steps attend to.

`python -m benchmarks.answers.recall --model DIR`, on a GPU in about a minute, else on a CPU in
float32. Prompts are lookups of ``vllm_kvx.tools.evaluate`` under the checkpoint's chat template, at
several lengths. The checkpoint answers them greedily with full attention; then

- the queries of its first decode steps give `mass`, `sharp` and `overlap`, as in ``recall``, in
  layers from the third on;
- it is given its own answer again, and every step reads what retrieval selects. `right` is the
  share of lookups, of those that full attention answers right, whose tokens all stay the most
  likely ones up to the end of the asked value; `agree` the share of such tokens, of all lookups;
  `loss` what the answer's tokens lose in log-probability, on average, in nats.

The first token of an answer is the prompt's, which reads everything.
"""

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.answers.recall_attention import Model, unit_scores
from benchmarks.answers.recall_data import REDUCTIONS, Key, score
from vllm_kvx.tools.tasks.prompts import EncodedSample, fitted
from vllm_kvx.tools.tasks.table import TASKS

BUDGETS = (32, 64, 128, 256, 512, 1024)
# Method and its group or page.
METHODS = (("fier", 32), ("fier", 64), ("fier", 128), ("quest", 16))
# Those that answer, too.
ANSWER_METHODS = (("fier", 32), ("fier", 128), ("quest", 16))
METRICS = ("mass", "sharp", "overlap")
ANSWERS = ("right", "agree", "loss")
LOOKUPS = ("several_words", "niah_multikey_1", "niah_multivalue", "code_lookup")
# Values of one prompt, by what was read; a list holds one value for each budget.
Values = dict[tuple[str, int, str], dict[str, list[float]]]


def by_unit(values: Tensor, unit: int) -> Tensor:
    """Sums of (..., N) values over units of `unit` keys; the last unit may be shorter."""
    if unit == 1:
        return values
    short = -values.shape[-1] % unit
    return torch.nn.functional.pad(values, (0, short)).unflatten(-1, (-1, unit)).sum(dim=-1)


def measure(query: Tensor, keys: Tensor, first: int, scaling: float) -> Values:
    """Sums of every metric over the steps and heads of a layer; the counts are of what.

    query: (H, n, D). keys: (G, first + n, D); see ``unit_scores``.
    """
    kv_heads, length = keys.shape[:2]
    rows = query.shape[1]
    grouped = query.unflatten(0, (kv_heads, -1))  # (G, H / G, n, D)
    logits = torch.einsum("ghnd,gmd->ghnm", grouped, keys) * scaling
    seen = first + 1 + torch.arange(rows, device=keys.device)[:, None]
    logits.masked_fill_(torch.arange(length, device=keys.device) >= seen, -torch.inf)
    probs = logits.softmax(dim=-1)
    is_sharp = probs.amax(dim=-1) > 0.5
    order = probs.sum(dim=1).argsort(dim=-1, descending=True)
    rank = order.argsort(dim=-1)
    budgets = torch.tensor(BUDGETS, device=keys.device)
    found: dict[tuple[str, int, str], list[Tensor]] = {}

    def add(key: tuple[str, int, str], order: Tensor, unit: int) -> None:
        """order: (G, n, units), best first."""
        last = (budgets // unit - 1).clamp(max=order.shape[-1] - 1)
        held = by_unit(probs, unit).gather(-1, order[:, None].expand(-1, probs.shape[1], -1, -1))
        mass = held.cumsum(dim=-1)[..., last]  # (G, H / G, n, budgets)
        common = []
        for budget, of_units in zip(BUDGETS, last.tolist(), strict=True):
            best = by_unit((rank < budget).float(), unit).gather(-1, order)
            common.append(best[..., : of_units + 1].sum() / budget)
        found[key] = [mass.sum((0, 1, 2)), mass[is_sharp].sum(0), torch.stack(common)]

    add(("exact", 1, "sum"), order, 1)
    for method, group in METHODS:
        products = score(query.flatten(0, 1), keys, method, group).unflatten(0, query.shape[:2])
        for name in REDUCTIONS:
            key = method, group, name
            scores = unit_scores(products, kv_heads, first, length, key, scaling)
            best = scores.argsort(dim=-1, descending=True, stable=True)
            add(key, best, 1 if method == "fier" else group)
    sums = torch.stack([torch.stack(values) for values in found.values()]).tolist()
    counts = {
        "count": [float(is_sharp.numel())],
        "sharp_count": [float(is_sharp.sum())],
        "overlap_count": [float(kv_heads * rows)],
    }
    return {
        key: dict(zip(METRICS, values, strict=True)) | counts
        for key, values in zip(found, sums, strict=True)
    }


def readings() -> list[Key | None]:
    """What answers are read by; a group larger than the budget is no policy."""
    every = product(ANSWER_METHODS, REDUCTIONS, BUDGETS)
    return [None, *((*m, name, budget) for m, name, budget in every if m[1] <= budget)]


def cut(
    tokens: list[int], prompt: EncodedSample, model: Model, task: str
) -> tuple[list[int], float]:
    """The tokens up to the end of what scores, at least two, and the score; all if none does."""

    def scored(count: int) -> float:
        text = model.tokenizer.decode(tokens[:count], skip_special_tokens=True)
        return TASKS[task].score(text, prompt.sample)

    best = scored(len(tokens))
    if not best:
        return tokens, best
    needed = next((n for n in range(2, len(tokens)) if scored(n) >= best), len(tokens))
    return tokens[:needed], best


def prompts_of(args: Namespace, model: Model) -> Iterator[tuple[int, str, EncodedSample]]:
    """Length asked for, task and prompt; tasks take turns, and then lengths."""
    tasks = args.tasks
    for number in range(args.prompts):
        length = args.lengths[number // len(tasks) % len(args.lengths)]
        task = tasks[number % len(tasks)]
        seed = f"recall {number} {task}"
        yield length, task, fitted(TASKS[task], seed, length, model.tokenizer)


def one_prompt(model: Model, prompt: EncodedSample, task: str, steps: int) -> dict[str, Any] | None:
    """What a prompt shows; None if the model says nothing."""
    tokens = model.answer(prompt.token_ids, min(TASKS[task].max_tokens, 48))
    if len(tokens) < 2:
        return None
    answer, points = cut(tokens, prompt, model, task)
    count = min(steps, len(answer))
    total: dict[tuple[str, int, str], dict[str, Tensor]] = {}
    for layer in model.layers:
        query = torch.cat(model.queries[layer][:count], dim=1).float()
        keys = model.keys[layer][:, : model.length + count].float()
        for key, sums in measure(query, keys, model.length, model.scaling(layer)).items():
            mine = total.setdefault(key, {})
            for name, values in sums.items():
                mine[name] = mine.get(name, torch.zeros(())) + torch.tensor(values)
    right, likely = model.read(answer, readings())
    return {
        "task": task,
        "tokens": model.length,
        "answer": len(answer),
        "score": points,
        "metrics": total,
        "right": right,
        "likely": likely,
    }


def means(found: dict[str, Any]) -> dict[tuple[str, int, str, int], dict[str, float]]:
    """One prompt's value of everything that it has values of, by what was read."""
    values: dict[tuple[str, int, str, int], dict[str, float]] = defaultdict(dict)
    for key, sums in found["metrics"].items():
        for i, budget in enumerate(BUDGETS):
            if key[0] == "fier" and key[1] > budget:
                continue
            at = values[*key, budget]
            at["mass"] = float(sums["mass"][i] / sums["count"][0])
            at["overlap"] = float(sums["overlap"][i] / sums["overlap_count"][0])
            if sums["sharp_count"][0]:
                at["sharp"] = float(sums["sharp"][i] / sums["sharp_count"][0])
    full, *others = range(len(found["right"]))
    for b, reading in zip(others, readings()[1:], strict=True):
        assert reading is not None
        right = found["right"][b]
        at = values[reading]
        at["agree"] = float(right.float().mean())
        at["loss"] = float((found["likely"][full] - found["likely"][b]).mean())
        if found["score"] == 1:
            at["right"] = float(right.all())
    return values


def summarise(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method and reduction: means over prompts by budget.

    `mass_to_max` and the like are paired: the mean difference and its standard error.
    """
    prompts = [means(one) for one in found]
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for key in prompts[0] if prompts else ():
        method, group, reduction, budget = key
        row = rows.setdefault(key[:3], {"method": method, "group": group, "reduction": reduction})
        for metric in (*METRICS, *ANSWERS):
            mine = [one[key][metric] for one in prompts if metric in one[key]]
            if not mine:
                continue
            row.setdefault(metric, {})[str(budget)] = round(statistics.mean(mine), 5)
            base = (method, group, "max", budget)
            if reduction == "max" or base not in prompts[0] or len(mine) < 2:
                continue
            apart = [o[key][metric] - o[base][metric] for o in prompts if metric in o[key]]
            error = statistics.stdev(apart) / len(apart) ** 0.5
            difference = [round(statistics.mean(apart), 5), round(error, 5)]
            row.setdefault(f"{metric}_to_max", {})[str(budget)] = difference
    return list(rows.values())


def table(data: dict[str, Any]) -> str:
    """Markdown: every metric, by method, reduction and budget, over all lengths."""
    lines = []
    for metric in (*METRICS, *ANSWERS):
        lines.append(f"### {metric}, {'nats' if metric == 'loss' else '%'}\n")
        lines.append(f"| read | {' | '.join(map(str, BUDGETS))} |")
        lines.append("|---" * (1 + len(BUDGETS)) + "|")
        for row in data["all"]["rows"]:
            if metric not in row:
                continue
            name = f"{row['method']} {row['group']}, {row['reduction']}"
            scale, digits = (1, 3) if metric == "loss" else (100, 1)
            cells = [row[metric].get(str(budget)) for budget in BUDGETS]
            text = " | ".join("-" if c is None else f"{scale * c:.{digits}f}" for c in cells)
            lines.append(f"| {name} | {text} |")
        lines.append("")
    return "\n".join(lines)


def add_arguments(parser: ArgumentParser) -> None:
    """Those of a real checkpoint."""
    add = parser.add_argument
    add("--model", type=Path, help="the folder of a checkpoint: measures it, and nothing else")
    add("--lengths", type=int, nargs="+", default=[4096, 8192, 16384], help="of its prompts")
    add("--tasks", nargs="+", choices=sorted(TASKS), default=LOOKUPS, metavar="TASK")
    add("--steps", type=int, default=8, help="decode steps of a prompt that are measured")
    add("--time-limit", type=float, default=600, help="seconds: prompts beyond them are left out")


def run(args: Namespace, head: dict[str, Any], log: Callable[[str], None]) -> dict[str, Any]:
    """The results of a checkpoint, fit for JSON."""
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # What runs is small: with more they mostly wait for one another.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Model(args.model, device, dtype)
    config = model.model.config
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number, (length, task, prompt) in enumerate(prompts_of(args, model)):
        one = one_prompt(model, prompt, task, args.steps)
        if one is not None:
            found["all"].append(one)
            found[str(length)].append(one)
        elapsed = time.monotonic() - began
        log(f"{args.model.name}: prompt {number + 1} of {args.prompts}, {elapsed:.0f} s")
        if elapsed > args.time_limit:
            break
    return head | {
        "model": args.model.name,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "layers": len(model.model.model.layers),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "dtype": str(dtype).removeprefix("torch."),
        "prompts": [
            {key: one[key] for key in ("task", "tokens", "answer", "score")} for one in found["all"]
        ],
        "data": {
            length: {
                "samples": len(some),
                "answered_right": sum(one["score"] == 1 for one in some),
                "full_agrees": statistics.mean(
                    float(one["right"][0].float().mean()) for one in some
                ),
                "rows": summarise(some),
            }
            for length, some in found.items()
        },
        "seconds": round(time.monotonic() - began, 1),
    }
