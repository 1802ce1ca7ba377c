"""How much attention the retrieved tokens hold, against exact attention: the recall table.

`python -m benchmarks.recall` on CPU, in a few minutes. For each budget, FIER's groups, Quest's
pages and each reduction over the query heads of a KV head:

- mass: the share of a query head's softmax on the tokens that are read;
- sharp: the same of those query heads alone that have half of their softmax on one token;
- overlap: the share of the budget that is also in the exact top (by softmax summed over heads).

Two sets of data: the demo checkpoint's keys and queries in decode, and random ones (`planted`). On
the checkpoint also the share of answers that are right. `exact top` reads the exact top itself,
`softmax/2` is the reduction `softmax` of halved products: 1-bit keys, half a group's range from its
middle, make products about twice as large as they are.
"""

import argparse
import datetime
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.checkpoint.prompts import make_prompt
from benchmarks.compare import ROOT, git_commit
from benchmarks.engine import write_json
from vllm_kvx.policy import retrieval

BUDGETS = (256, 512, 1024, 2048, 4096)
ANSWER_BUDGETS = (64, 128, 256, 512)
# Method and its group or page.
METHODS = (("fier", 32), ("fier", 64), ("fier", 128), ("quest", 16))
ANSWER_METHODS = (("fier", 32), ("quest", 16))
# Reduction of the reference math, and what products are multiplied with before.
REDUCTIONS: dict[str, tuple[str, float]] = {
    "max": ("max", 1),
    "sum": ("sum", 1),
    "softmax": ("softmax", 1),
    "softmax/2": ("softmax", 0.5),
}
EXACT = ("exact", 1)
METRICS = ("mass", "sharp", "overlap")
# Fewer sharp query heads say nothing.
_LEAST_SHARP = 20
_COLORS = {"max": "#4878a8", "sum": "#d1802f", "softmax": "#3a923a", "softmax/2": "#c03d3e"}
_DASHES = dict(zip(METHODS, ("-", "--", ":", "-."), strict=True))
# Method, group, reduction, budget.
Key = tuple[str, int, str, int]


@dataclass(frozen=True)
class Step:
    """One layer of one decode step: queries (H, D), keys (G, N, D) with the step's own as the last.

    sample: the prompt or draw that it belongs to; errors are those of means over samples.
    """

    sample: int
    query: Tensor
    keys: Tensor
    scaling: float


class Demo:
    """The demo checkpoint, whose decode steps are recorded, or read what retrieval selects."""

    def __init__(self, path: Path, length: int) -> None:
        self.length = length  # tokens of a prompt
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        loader: Any = AutoModelForCausalLM  # its type knows nothing of `dtype`
        self.model = loader.from_pretrained(path, dtype=torch.float32).eval()
        AttentionInterface.register("recall", self._attention)
        self.model.set_attn_implementation("recall")
        # By layer, the queries (H, n, D) of the rows from the last prompt token on, and all keys.
        self._queries: dict[int, list[Tensor]] = {}
        self._keys: dict[int, Tensor] = {}
        self._reading: Key | None = None
        self.full_answers: list[bool] = []
        self.answers: dict[Key, list[bool]] = {}

    def steps(self, samples: int) -> Iterator[Step]:
        """Decode steps in layers from the third on, and answers under retrieval on the way.

        Answers are of three words, each of which the model looks up at the place of the one before.
        The first step is the last prompt token, which looks up the question's key.
        """
        for sample in range(samples):
            prompt, answer = make_prompt(sample, self.length, self.tokenizer, values=3)
            wanted = self.tokenizer.encode(answer, add_special_tokens=False)
            self._queries, cache = {}, DynamicCache()
            first = self._run(self.tokenizer.encode(prompt), cache, 1)
            later = self._run(wanted, cache, len(wanted))
            expected = [*wanted, self.tokenizer.eos_token_id]
            self.full_answers.append([*first, *later] == expected)
            for layer, queries in self._queries.items():
                scaling = self.model.model.layers[layer].self_attn.scaling
                for i, query in enumerate(torch.cat(queries, dim=1).unbind(dim=1)):
                    yield Step(sample, query, self._keys[layer][:, : self.length + i], scaling)
            for method, group in ANSWER_METHODS:
                for reduction, budget in product(REDUCTIONS, ANSWER_BUDGETS):
                    self._reading = key = method, group, reduction, budget
                    cache.crop(self.length)
                    later = self._run(wanted, cache, len(wanted))
                    self.answers.setdefault(key, []).append([*first, *later] == expected)
            self._reading = None

    @torch.no_grad()
    def _run(self, ids: list[int], cache: DynamicCache, keep: int) -> list[int]:
        """The most likely token after each of the last `keep`."""
        out = self.model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=keep)
        return out.logits[0].argmax(dim=-1).tolist()

    def _attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **kw: Any) -> Any:
        count, length, scaling = q.shape[2], k.shape[2], kw["scaling"]
        seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        if module.layer_idx >= retrieval.DENSE_LAYERS and self._reading is None:
            first = max(0, self.length - 1 - (length - count))
            self._queries.setdefault(module.layer_idx, []).append(q[0, :, first:])
            self._keys[module.layer_idx] = k[0]
        elif module.layer_idx >= retrieval.DENSE_LAYERS and self._reading is not None:
            seen = self._selected(self._reading, q[0], k[0], scaling)
        # SDPA's own grouped-query path needs a full matrix in float32 on CPU.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        mask = {"is_causal": True} if count == length else {"attn_mask": seen}
        return scaled_dot_product_attention(q, k, v, scale=scaling, **mask).transpose(1, 2), None

    def _selected(self, key: Key, query: Tensor, keys: Tensor, scaling: float) -> Tensor:
        """(H, n, N) bool: what the heads of the last n of N keys read."""
        kv_heads, length = keys.shape[:2]
        heads, count = query.shape[:2]
        # Rows as further heads, so that keys are quantised once.
        products = score(query.flatten(0, 1), keys, *key[:2]).unflatten(0, (heads, count))
        seen = torch.zeros(heads, count, length, dtype=torch.bool)
        for row in range(count):
            known = length - count + row + 1
            full = retrieval.num_full_groups(known, key[1])
            units = full if key[0] == "quest" else full * key[1]
            reads = select(products[:, row, :units], kv_heads, known, scaling, key)
            for mine, read in zip(seen[:, row].chunk(kv_heads), reads, strict=True):
                mine[:, read] = True
        return seen


def planted(samples: int, length: int, heads: int = 8, kv_heads: int = 2) -> Iterator[Step]:
    """Gaussian keys of 128 channels, in which every query head looks for 64 tokens of its own.

    Channels have offsets, and four of them are outliers: offsets of about 12 and four times the
    spread. Unrelated tokens get normal logits of a standard deviation around 1.2, which differs
    between heads; a token that is looked for gets 5 to 9 more. The heads of a KV head draw theirs
    from 128 tokens, so that they share half.
    """
    dim, outliers, wanted = 128, 4, 64
    share = heads // kv_heads
    for sample in range(samples):
        generator = torch.Generator().manual_seed(sample)

        def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, generator=generator)

        spread, offset = torch.ones(kv_heads, 1, dim), normal(kv_heads, 1, dim)
        for head in range(kv_heads):
            where = torch.randperm(dim, generator=generator)[:outliers]
            spread[head, 0, where] = 4
            offset[head, 0, where] = 12 * normal(outliers).sign()
        keys = normal(kv_heads, length, dim) * spread
        query = normal(heads, dim)
        pools = [torch.randperm(length, generator=generator)[: 2 * wanted] for _ in spread]
        for head in range(heads):
            group = head // share
            deviation = 1.2 * math.exp(0.3 * float(normal(1)))
            query[head] *= deviation * dim**0.5 / (query[head] * spread[group, 0]).norm()
            tokens = pools[group][torch.randperm(2 * wanted, generator=generator)[:wanted]]
            gain = 5 + 4 * torch.rand(wanted, 1, generator=generator)
            direction = query[head] / query[head].square().sum() * dim**0.5
            keys[group, tokens] += gain * direction
        yield Step(sample, query, keys + offset, dim**-0.5)


def score(query: Tensor, keys: Tensor, method: str, group: int) -> Tensor:
    """Products of query (H, D) with the 1-bit keys of all full groups, or the pages' bounds."""
    full = retrieval.num_full_groups(keys.shape[1], group) * group
    signs, scales, zeros = retrieval.quantize_keys(keys[:, :full], group)
    scores = []
    # One KV head at a time: the reference copies the keys for every query head.
    for head, mine in enumerate(query.chunk(len(keys))):
        one = slice(head, head + 1)
        if method == "quest":
            scores.append(retrieval.page_scores(mine, scales[one], zeros[one]))
        else:
            copies = signs[one], scales[one], zeros[one]
            scores.append(retrieval.token_scores(mine, *copies))
    return torch.cat(scores)


def select(products: Tensor, kv_heads: int, length: int, scaling: float, key: Key) -> list[Tensor]:
    """What each KV head reads of `length` keys, by products (H, units)."""
    method, group, name, budget = key
    reduction, factor = REDUCTIONS[name]
    scores = retrieval.reduce_heads(products * factor, kv_heads, reduction, scaling)
    unit = 1 if method == "fier" else group
    return [retrieval.select_units(row, length, group, unit, budget) for row in scores]


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
        label(row): [f"{100 * row['right'][str(b)]:.1f}" for b in ANSWER_BUDGETS]
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
            shares = [100 * row[metric][str(b)] for b in budgets]
            marker = "o" if row["method"] == "quest" else None
            axis.plot(budgets, shares, marker=marker, markersize=3, label=label(row), **style)
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
    axes[3, 0].set_title(f"right answers, %; full attention {100 * answers['full']:.0f}")
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
    add("--prompts", type=int, default=8)
    add("--draws", type=int, default=10)
    add("--out", type=Path, default=ROOT / "benchmarks/results/recall.json")
    args = parser.parse_args(argv)
    if min(args.prompts, args.draws) < 2 or min(args.length, args.random_length) <= max(BUDGETS):
        parser.error(f"give two samples of each and lengths above {max(BUDGETS)}")

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
    results: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.recall", *argv]),
        "date": datetime.date.today().isoformat(),
        "commit": git_commit(),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "data": {},
    }
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
    results["answers"] = {
        "what": "decode steps under retrieval, given the right tokens so far",
        "samples": args.prompts,
        "full": statistics.mean(demo.full_answers),
        "rows": [
            {
                "method": method,
                "group": group,
                "reduction": reduction,
                "right": {
                    str(budget): statistics.mean(demo.answers[method, group, reduction, budget])
                    for budget in ANSWER_BUDGETS
                },
            }
            for (method, group), reduction in product(ANSWER_METHODS, REDUCTIONS)
        ],
    }
    results["seconds"] = round(time.monotonic() - began, 1)
    write_json(args.out, results)
    plot(results, args.out.with_suffix(".png"))
    print(table(results))


if __name__ == "__main__":
    main(sys.argv[1:])
