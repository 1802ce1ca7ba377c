"""How much attention the retrieved tokens hold, against exact attention: the recall table.

`python -m benchmarks.recall` on CPU, in about ten minutes. For each budget, FIER's groups, Quest's
pages and each reduction over the query heads of a KV head:

- mass: the share of a query head's softmax on the tokens that are read;
- sharp: the same of those query heads alone that have half of their softmax on one token;
- overlap: the share of the budget that is also in the exact top (by softmax summed over heads).

Two sets of data: the demo checkpoint's keys and queries in decode, and random ones (`planted`). On
the checkpoint also the share of lookups that are answered right, of several in each of several
documents (`Demo.lookups`). `exact top` reads the exact top itself, `softmax/2` is the reduction
`softmax` of halved products: 1-bit keys, half a group's range from its middle, make products about
twice as large as they are.

No engine runs: the checkpoint runs in transformers, in float32, and what its attention reads is
chosen by ``vllm_kvx.policy.retrieval``, which the engine's kernels are tested against.
"""

import argparse
import datetime
import math
import os
import platform
import random
import re
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
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from benchmarks.checkpoint.prompts import make_prompt, words
from benchmarks.compare import ROOT, git_commit
from benchmarks.engine import write_json
from vllm_kvx.policy import retrieval

BUDGETS = (256, 512, 1024, 2048, 4096)
ANSWER_BUDGETS = (64, 128, 256, 512)
# Method and its group or page.
METHODS = (("fier", 32), ("fier", 64), ("fier", 128), ("quest", 16))
ANSWER_METHODS = (("fier", 32), ("fier", 128), ("quest", 16))
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
        # Of the tokens that ran last with full attention, by layer: (H, N, D) and (G, N, D).
        self._queries: dict[int, Tensor] = {}
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        # What the sequences of a batch read; empty where all read everything, and are recorded.
        self._readings: list[Key | None] = []

    def steps(self, samples: int) -> Iterator[Step]:
        """Decode steps in layers from the third on.

        Answers are of three words, each of which the model looks up at the place of the one before.
        The first step is the last prompt token, which looks up the question's key.
        """
        for sample in range(samples):
            prompt, answer = make_prompt(sample, self.length, self.tokenizer, values=3)
            wanted = self.tokenizer.encode(answer, add_special_tokens=False)
            self._run([[*self.tokenizer.encode(prompt), *wanted]], 0)
            for layer in range(retrieval.DENSE_LAYERS, len(self.model.model.layers)):
                scaling = self.model.model.layers[layer].self_attn.scaling
                for known in range(self.length, self.length + len(wanted) + 1):
                    query, keys = self._queries[layer][:, known - 1], self._keys[layer][:, :known]
                    yield Step(sample, query, keys, scaling)

    def lookups(self, documents: int, questions: int) -> Iterator[dict[Key | None, bool]]:
        """Whether the answer to a question is right, by what its decode steps read; None is all.

        A document is a prompt of `steps`, of whose notes some are asked for in turn. Every step is
        given the right tokens so far, so an answer is right where the greedy one is, token by token
        up to the end of sequence. The last prompt token, the key asked for, reads everything.
        """
        readings: list[Key | None] = [None, *answer_keys()]
        for sample in range(documents):
            prompt = make_prompt(sample, self.length, self.tokenizer, values=3)[0]
            notes = re.findall(r"^- (\w+)((?: \w+){3}\.)$", prompt, re.MULTILINE)
            notes = [note for note in notes if note[0] in words()]
            *document, _ = self.tokenizer.encode(prompt)
            self._readings = []
            self._run([document], 0)
            self._readings = readings
            for note in random.Random(sample).sample(notes, questions):
                key, *wanted = self.tokenizer.encode(f" {''.join(note)}", add_special_tokens=False)
                found = self._run([[key, *wanted]] * len(readings), len(document))
                expected = torch.tensor([*wanted, self.tokenizer.eos_token_id])
                right = (found == expected).all(dim=1).tolist()
                yield dict(zip(readings, right, strict=True))

    @torch.no_grad()
    def _run(self, ids: list[list[int]], start: int) -> Tensor:
        """The most likely token after each of `ids` (B, n), the first at position `start`."""
        tokens = torch.tensor(ids)
        positions = torch.arange(start, start + tokens.shape[1])[None]
        out = self.model(tokens, position_ids=positions, use_cache=False)
        return out.logits.argmax(dim=-1)

    def _attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **kw: Any) -> Any:
        layer, scaling = module.layer_idx, kw["scaling"]
        if self._readings:
            return self._read(layer, q, k, v, scaling), None
        self._queries[layer], self._keys[layer], self._values[layer] = q[0], k[0], v[0]
        # SDPA's own grouped-query path needs a full matrix in float32 on CPU.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, scale=scaling, is_causal=True)
        return out.transpose(1, 2), None

    def _read(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Attention (B, n, H, D) of q (B, H, n, D): the last prompt token and the answer's."""
        rows, kv_heads = q.shape[2], k.shape[1]
        q = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3, 4)  # (G, H / G, B, n, D)
        shape = q.shape[:4]
        # The prompt's last token is the same in all sequences, as it reads everything in all.
        keys = torch.cat([self._keys[layer], k[0, :, :1]], dim=1)
        values = torch.cat([self._values[layer], v[0, :, :1]], dim=1)
        k, v = k[:, :, 1:], v[:, :, 1:]

        earlier = (q.flatten(1, 3) @ keys.mT).unflatten(1, shape[1:])  # (G, H / G, B, n, N)
        if layer >= retrieval.DENSE_LAYERS:
            seen = self._selected(q[..., 1:, :], keys, scaling)
            earlier[..., 1:, :].masked_fill_(~seen[:, None], -torch.inf)
        own = torch.einsum("ghbnd,bgmd->ghbnm", q, k)
        own.masked_fill_(torch.ones(rows, rows - 1).tril(-1) == 0, -torch.inf)
        probs = (torch.cat([earlier, own], dim=-1) * scaling).softmax(dim=-1)
        earlier, own = probs.tensor_split([keys.shape[1]], dim=-1)
        out = (earlier.flatten(1, 3) @ values).unflatten(1, shape[1:])
        out = out + torch.einsum("ghbnm,bgmd->ghbnd", own, v)
        return out.permute(2, 3, 0, 1, 4).flatten(2, 3)

    def _selected(self, query: Tensor, keys: Tensor, scaling: float) -> Tensor:
        """(G, B, n, N) bool, which of a prompt's N keys the n tokens after it read.

        query: (G, H / G, B, n, D). keys: (G, N, D). Of the answer they read every token so far.
        """
        kv_heads, length = keys.shape[:2]
        batch, rows = query.shape[2:4]
        seen = torch.ones(kv_heads, batch, rows, length, dtype=torch.bool)
        for method, group in ANSWER_METHODS:
            if retrieval.num_full_groups(length + rows, group) > length // group:
                raise ValueError(f"an answer to {length} tokens fills a group of {group}")
            mine = [b for b, key in enumerate(self._readings) if key and key[:2] == (method, group)]
            some = query[:, :, mine]
            products = score(some.flatten(0, 3), keys, method, group)
            products = products.unflatten(0, some.shape[:4]).flatten(0, 1)  # (H, b, n, units)
            for i, row in product(range(len(mine)), range(rows)):
                key = self._readings[mine[i]]
                assert key is not None
                reads = select(products[:, i, row], kv_heads, length + row + 1, scaling, key)
                for of_head, read in zip(seen[:, mine[i], row], reads, strict=True):
                    of_head.fill_(False)[read[read < length]] = True
        return seen


def answer_keys() -> list[Key]:
    """What lookups are answered with; a group larger than the budget is no policy."""
    every = product(ANSWER_METHODS, REDUCTIONS, ANSWER_BUDGETS)
    return [(*method, name, budget) for method, name, budget in every if method[1] <= budget]


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
    """Products of query (H, D) with the 1-bit keys of all whole groups, or the pages' bounds.

    As ``retrieval.token_scores`` and ``page_scores``, which copy the keys for every query head.
    """
    whole = keys.shape[1] // group * group
    signs, *halves = retrieval.quantize_keys(keys[:, :whole], group)
    scales, zeros = (x.float() for x in halves)
    query = query.unflatten(0, (len(keys), -1))
    if method == "quest":
        return (query @ zeros.mT + query.abs() @ scales.mT).flatten(0, 1)
    scales, zeros = (x.repeat_interleave(group, dim=1) for x in (scales, zeros))
    return (query @ (zeros + scales * signs).mT).flatten(0, 1)


def select(products: Tensor, kv_heads: int, length: int, scaling: float, key: Key) -> list[Tensor]:
    """What each KV head reads of `length` keys, by products (H, units) of at least the full groups.

    The last of the keys is the step's own.
    """
    method, group, name, budget = key
    reduction, factor = REDUCTIONS[name]
    unit = 1 if method == "fier" else group
    products = products[:, : retrieval.num_full_groups(length, group) * group // unit]
    scores = retrieval.reduce_heads(products * factor, kv_heads, reduction, scaling)
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
    add("--out", type=Path, default=ROOT / "benchmarks/results/recall.json")
    args = parser.parse_args(argv)
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
    found = []
    for answers in demo.lookups(args.documents, args.questions):
        found.append(answers)
        done = f"lookup {len(found)} of {args.documents * args.questions}"
        print(f"\r{done}, {time.monotonic() - began:.0f} s ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    results["answers"] = {
        "what": "tests/checkpoints/lookup-8l in transformers, float32; decode steps read what "
        "vllm_kvx.policy.retrieval selects, given the right tokens so far; right if all are, up to "
        "the end of sequence",
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
