"""What uneven budgets would keep: by layer, by head, at an equal total, on a real checkpoint.

    python -m benchmarks.answers.budgets --model DIR --out NAME.json

The checkpoint answers lookups greedily with full attention. Retention then scores the prompt's
entries, as `snapkv` does, by the window and by the answer's first `--after` tokens, and keeps a
share of them, and what later tokens of the answer attend to is looked up in what stays:

- `mass`: the share of their attention to the prompt, over all layers and heads.
- `sharp`: of the times that a query head has half of its attention on one entry of the prompt, how
  often that entry stays.

Budgets are `equal`; `heads`, Ada-KV's (arXiv 2407.11550): a layer's total goes to whichever head
has the higher scores, a fifth of an equal share being safe; `layers`: a share for each layer, by
what prompts of the other tasks lost at it; `pyramid`, PyramidKV's; and `free`: the total goes to
whichever entry has the highest score. Answers that end before `--after` tokens are left out.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.answers.recall_attention import Model
from benchmarks.common.about import about, command_line
from benchmarks.common.files import write_json
from vllm_kvx.equations.saliency import max_pool, per_kv_head
from vllm_kvx.policy.methods.baselines.pyramidkv import PyramidKV
from vllm_kvx.policy.methods.snapkv import SnapKV
from vllm_kvx.tools.tasks.prompts import fitted
from vllm_kvx.tools.tasks.table import TASKS

DEFAULT_TASKS = ("many_values", "long_phrase", "niah_multivalue", "niah_multiquery", "cwe")
RATES = (0.025, 0.05, 0.1, 0.2)
WAYS = ("equal", "heads", "layers", "pyramid", "free")
# Of an equal share: what each head has whatever its scores are (Ada-KV's alpha).
SAFE = 0.2
# In how many steps a layer's share grows to twice the equal one, and what it has at least.
STEPS, LEAST = 8, 0.25


class Recorded(Model):
    """A checkpoint that also keeps the queries of a prompt's window."""

    window = SnapKV().window

    def _prompt(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        self.queries[layer] = [q[0][:, -self.window :]]
        return super()._prompt(layer, q, k, v, scaling)


@dataclass(frozen=True)
class Found:
    """One prompt of N tokens in a model of L layers with G KV heads.

    scores: (L, G, N) float32, by which entries stay. needed: (L, G, N) float32, the later tokens'
    attention. sharp: (n, 3) int64, layer, KV head and entry that have half of a query head's.
    """

    task: str
    scores: Tensor
    needed: Tensor
    sharp: Tensor


def attention(query: Tensor, keys: Tensor, first: int, scaling: float) -> Tensor:
    """Probabilities (G, H / G, n, N) of queries (H, n, D), the i-th of which sees `first + i + 1`
    of keys (G, N, D)."""
    grouped = query.unflatten(0, (len(keys), -1))
    logits = torch.einsum("ghnd,gmd->ghnm", grouped.float(), keys.float()) * scaling
    seen = first + 1 + torch.arange(query.shape[1], device=keys.device)[:, None]
    hidden = torch.arange(keys.shape[1], device=keys.device) >= seen
    return logits.masked_fill_(hidden, -torch.inf).softmax(dim=-1)


def look(model: Recorded, task: str, prompt: Sequence[int], after: int) -> Found | None:
    """What a prompt's answer attends to; None if it ends within `after` tokens."""
    tokens = model.answer(prompt, TASKS[task].max_tokens)
    if len(tokens) <= after:
        return None
    length, kernel, layers = model.length, SnapKV().kernel, len(model.model.model.layers)
    scores, needed, sharp = [], [], []
    for layer in range(layers):
        # The window and the answer, of which the last token has run, too.
        query = torch.cat(model.queries[layer], dim=1)
        probs = attention(query, model.keys[layer], length - model.window, model.scaling(layer))
        probs = probs[..., :length]
        cut = model.window + after
        by_head = probs[:, :, :cut].sum(dim=2).flatten(0, 1)
        found = per_kv_head(max_pool(by_head, kernel), len(probs))
        found[:, -model.window :] = torch.inf
        scores.append(found)
        later = probs[:, :, cut:]
        needed.append(later.sum(dim=(1, 2)))
        group, _, _, entry = (later > 0.5).nonzero(as_tuple=True)
        sharp.append(torch.stack([torch.full_like(group, layer), group, entry], dim=1))
    return Found(task, torch.stack(scores), torch.stack(needed), torch.cat(sharp))


def best(scores: Tensor, counts: Tensor) -> Tensor:
    """Which of (..., N) scores are among the `counts` highest of their row; counts: (...)."""
    rank = scores.argsort(dim=-1, descending=True).argsort(dim=-1)
    return rank < counts[..., None]


def by_head(scores: Tensor, cap: int) -> Tensor:
    """Ada-KV's choice of (L, G, N) scores: `cap` a head on average, some of them safe."""
    layers, heads, length = scores.shape
    safe = best(scores, torch.full((layers, heads), int(cap * SAFE), device=scores.device))
    raised = scores.masked_fill(safe, torch.inf).flatten(1)
    total = torch.full((layers,), cap * heads, device=scores.device)
    return best(raised, total).view(layers, heads, length)


def curve(found: Found, rate: float) -> Tensor:
    """(L, 2 * STEPS + 1): the attention that a layer holds at shares of `rate / STEPS` each."""
    order = found.scores.argsort(dim=-1, descending=True)
    held = found.needed.gather(-1, order).cumsum(dim=-1) / found.needed.sum()
    length = held.shape[-1]
    ends = [max(int(length * rate * step / STEPS), 1) - 1 for step in range(2 * STEPS + 1)]
    return held[..., ends].sum(dim=1)


def layer_shares(others: Sequence[Found], rate: float) -> list[float]:
    """Of `rate` each layer's share, 1 on average, that keeps most of the others' attention."""
    held = torch.stack([curve(each, rate) for each in others]).mean(dim=0)
    layers = len(held)
    steps = [int(LEAST * STEPS)] * layers
    for _ in range(layers * STEPS - sum(steps)):
        gains = [
            float(held[i, n + 1] - held[i, n]) if n < 2 * STEPS else -1.0
            for i, n in enumerate(steps)
        ]
        steps[gains.index(max(gains))] += 1
    return [step / STEPS for step in steps]


def kept_by(way: str, found: Found, rate: float, shares: Sequence[float]) -> Tensor:
    """(L, G, N) bool: what stays of a prompt."""
    scores = found.scores
    layers, heads, length = scores.shape
    cap = int(length * rate)
    if way == "heads":
        return by_head(scores, cap)
    if way == "free":
        total = torch.tensor([cap * heads * layers], device=scores.device)
        return best(scores.flatten()[None], total).view_as(scores)
    if way == "pyramid":
        policy = PyramidKV(kv_rate=rate, kv_floor=0, groups=layers)
        caps = [policy.kept(length, length, layer, 1, layers) for layer in range(layers)]
    else:
        caps = [int(cap * share) for share in (shares if way == "layers" else [1.0] * layers)]
    return best(scores, torch.tensor(caps, device=scores.device)[:, None].expand(-1, heads))


def values_of(found: Found, kept: Tensor) -> dict[str, float]:
    """Its metrics; `sharp` is left out where no attention is."""
    values = {"mass": float((found.needed * kept).sum() / found.needed.sum())}
    if len(found.sharp):
        values["sharp"] = float(kept[tuple(found.sharp.unbind(1))].float().mean())
    return values | {"entries": float(kept.float().mean())}


def summarise(prompts: Sequence[Found]) -> list[dict[str, Any]]:
    """A row for each rate and way: means over prompts of several tasks, and how far `equal` is."""
    rows = []
    tasks = sorted({each.task for each in prompts})
    for rate in RATES:
        shares = {t: layer_shares([p for p in prompts if p.task != t], rate) for t in tasks}
        of_way: dict[str, list[dict[str, float]]] = {
            way: [values_of(p, kept_by(way, p, rate, shares[p.task])) for p in prompts]
            for way in WAYS
        }
        for way, values in of_way.items():
            row: dict[str, Any] = {"rate": rate, "budgets": way}
            for metric in ("mass", "sharp", "entries"):
                mine = [each[metric] for each in values if metric in each]
                row[metric] = round(statistics.mean(mine), 5) if mine else None
                base = [each[metric] for each in of_way["equal"] if metric in each]
                apart = [a - b for a, b in zip(mine, base, strict=True)]
                if way != "equal" and metric != "entries" and len(apart) > 1:
                    error = statistics.stdev(apart) / len(apart) ** 0.5
                    row[f"{metric}_to_equal"] = [round(statistics.mean(apart), 5), round(error, 5)]
            rows.append(row)
        rows[-1]["layer_shares"] = shares
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: both metrics in %, by rate and way."""
    lines = ["| kept | budgets | mass | sharp |", "|---|---|---|---|"]
    for row in rows:
        cells = ["-" if row[m] is None else f"{100 * row[m]:.2f}" for m in ("mass", "sharp")]
        lines.append(f"| {row['rate']:.1%} | {row['budgets']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the folder of a checkpoint")
    add("--out", type=Path, required=True)
    add("--lengths", type=int, nargs="+", default=[16384], help="of its prompts")
    add("--tasks", nargs="+", choices=sorted(TASKS), default=DEFAULT_TASKS, metavar="TASK")
    add("--prompts", type=int, default=40)
    add("--after", type=int, default=32, help="tokens of the answer that score, too; 0: the window")
    add("--commit", help="what is measured, where the tree is no git checkout")
    add("--time-limit", type=float, default=600, help="seconds: prompts beyond them are left out")
    args = parser.parse_args(argv)
    if len(set(args.tasks)) < 2:
        parser.error("--tasks: name two at least; a layer's share is measured on the other tasks")
    if args.prompts < len(args.tasks):
        parser.error(
            f"--prompts {args.prompts}: give one for each of {len(args.tasks)} tasks at least"
        )
    if args.after < 0:
        parser.error("--after must be at least 0")
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Recorded(args.model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    prompts: list[Found] = []
    lengths: list[int] = []
    for number in range(args.prompts):
        task = args.tasks[number % len(args.tasks)]
        length = args.lengths[number // len(args.tasks) % len(args.lengths)]
        prompt = fitted(TASKS[task], f"budgets {number} {task}", length, model.tokenizer)
        found = look(model, task, prompt.token_ids, args.after)
        if found is not None:
            prompts.append(found)
            lengths.append(model.length)
        elapsed = time.monotonic() - began
        print(f"prompt {number + 1} of {args.prompts}, {elapsed:.0f} s", file=sys.stderr)
        if elapsed > args.time_limit:
            break
    if len({each.task for each in prompts}) < 2:
        raise SystemExit(
            f"answers of two tasks at least have to be longer than {args.after} tokens"
        )
    command = command_line("benchmarks.answers.budgets", argv)
    what = "What retention would keep of later tokens' attention with uneven budgets, by the total."
    head = about(what, command, args.commit, ("transformers",))
    rows = summarise(prompts)
    results = {
        "about": head,
        "model": args.model.name,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "after": args.after,
        "prompts": [
            {"task": each.task, "tokens": length, "sharp": len(each.sharp)}
            for each, length in zip(prompts, lengths, strict=True)
        ],
        "rows": rows,
        "seconds": round(time.monotonic() - began, 1),
    }
    write_json(args.out, results)
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
