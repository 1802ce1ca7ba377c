"""What a selection finds that was made for an earlier layer or step, on a real checkpoint.

    python -m benchmarks.answers.reuse --model DIR --out NAME.json

The checkpoint answers lookups greedily with full attention. For every step of an answer, layer and
KV head a budget of entries is chosen by the exact products (``max`` over the query heads, as `fier`
chooses without the error of its 1-bit keys), and what the step attends to is looked up in a choice:

- `own`: of the same layer, head and step: what `fier` reads.
- `layers:n`: of the layer that is first among n, of the same head index.
- `pooled`, `pooled layers:n`: one choice for all heads of a layer, by their summed attention, as in
  TidalDecode (arXiv 2410.05076); of this layer, or of the first among n.
- `steps:n`: of the same layer and head, in the step that is first among n; entries since are read.

Two figures for each: `mass`, the share of attention, and `sharp`: of the times that a query head
has half of its attention on one entry, how often that is read. The first two layers read
everything, and are left out.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.answers.budgets import DEFAULT_TASKS, attention
from benchmarks.answers.recall_attention import Model
from benchmarks.common.about import about, command_line
from benchmarks.common.files import write_json
from vllm_kvx.tools.tasks.prompts import fitted
from vllm_kvx.tools.tasks.table import TASKS

BUDGETS = (1 / 8, 1 / 16, 1 / 32)
SPANS = (2, 3, 4, 6)
# Newest entries that are always read, as `fier` reads its newest group.
RECENT = 32


def steps_of(model: Model, layer: int) -> tuple[Tensor, Tensor]:
    """What each step of an answer attends to: products and probabilities (G, H / G, n, N)."""
    query, keys = torch.cat(model.queries[layer], dim=1), model.keys[layer]
    first, scaling = model.length, model.scaling(layer)
    grouped = query.unflatten(0, (len(keys), -1)).float()
    products = torch.einsum("ghnd,gmd->ghnm", grouped, keys.float())
    return products, attention(query, keys, first, scaling)


def choices(score: Tensor, first: int, budget: int) -> Tensor:
    """(G, n, N) bool: of scores of that shape the best `budget` of each step that it sees.

    first: entries that are there before step 0, whose own is the next.
    """
    rows, total = score.shape[-2:]
    index = torch.arange(total, device=score.device)
    seen = first + 1 + torch.arange(rows, device=score.device)[:, None]
    score = score.masked_fill(index >= seen - RECENT, torch.inf).masked_fill(
        index >= seen, -torch.inf
    )
    best = score.topk(min(budget, total), dim=-1).indices
    reads = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True)
    return reads & (index < seen)


def newest(reads: Tensor, first: int) -> Tensor:
    """`reads` with the newest entries of each step, and without those after it."""
    rows, total = reads.shape[-2:]
    index = torch.arange(total, device=reads.device)
    seen = first + 1 + torch.arange(rows, device=reads.device)[:, None]
    return (reads | (index >= seen - RECENT)) & (index < seen)


def since(reads: Tensor, first: int, span: int) -> Tensor:
    """What steps read that go by the choice of the first of `span` steps, and all entries since."""
    rows = torch.arange(reads.shape[-2], device=reads.device)
    chosen = rows // span * span
    index = torch.arange(reads.shape[-1], device=reads.device)
    later = (index >= first + 1 + chosen[:, None]) & (index < first + 1 + rows[:, None])
    return newest(reads[..., chosen, :] | later, first)


def look(model: Model, share: float) -> dict[str, list[tuple[float, float, int]]]:
    """By choice and layer: attention that is read, times that a sharp one is, and how many."""
    budget = max(int(model.length * share), RECENT)
    found: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    own: list[Tensor] = []
    pooled: list[Tensor] = []
    for place, layer in enumerate(model.layers):
        products, probs = steps_of(model, layer)
        own.append(choices(products.amax(dim=1), model.length, budget))
        # One choice costs every head as much, and they share it.
        pooled.append(choices(probs.sum(dim=(0, 1))[None], model.length, budget))
        ways = {"own": own[-1], "pooled": pooled[-1].expand_as(own[-1])}
        for span in SPANS:
            leader = place // span * span
            ways[f"layers:{span}"] = own[leader]
            ways[f"pooled layers:{span}"] = pooled[leader].expand_as(own[-1])
            ways[f"steps:{span}"] = since(own[-1], model.length, span)
        sharp = probs > 0.5
        for way, reads in ways.items():
            read = newest(reads, model.length)[:, None]
            mass = float((probs * read).sum(dim=-1).mean())
            hits, times = int((sharp & read).sum()), int(sharp.sum())
            found[way].append((mass, hits, times))
        # Those of layers that no later one goes by.
        own[: -max(SPANS)] = [own[0][..., :0, :]] * len(own[: -max(SPANS)])
        pooled[: -max(SPANS)] = [pooled[0][..., :0, :]] * len(pooled[: -max(SPANS)])
    return found


def summarise(prompts: Sequence[dict[float, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each budget and choice: means over prompts."""
    rows = []
    for share in BUDGETS:
        for way in prompts[0][share]:
            of_prompts = [prompt[share][way] for prompt in prompts]
            masses = [statistics.mean(m for m, _, _ in layers) for layers in of_prompts]
            hits = sum(h for layers in of_prompts for _, h, _ in layers)
            times = sum(t for layers in of_prompts for _, _, t in layers)
            rows.append(
                {
                    "budget": share,
                    "choice": way,
                    "mass": round(statistics.mean(masses), 5),
                    "sharp": round(hits / times, 5) if times else None,
                    "sharp_times": times,
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: mass and sharp in %, by choice and budget."""
    lines = ["| choice | " + " | ".join(f"{share:.1%}" for share in BUDGETS) + " |"]
    lines.append("|---" * (len(BUDGETS) + 1) + "|")
    for way in dict.fromkeys(row["choice"] for row in rows):
        cells = [
            f"{100 * row['mass']:.1f}; {100 * (row['sharp'] or 0):.1f}"
            for row in rows
            if row["choice"] == way
        ]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the folder of a checkpoint")
    add("--out", type=Path, required=True)
    add("--length", type=int, default=16384, help="of its prompts")
    add("--tasks", nargs="+", choices=sorted(TASKS), default=DEFAULT_TASKS, metavar="TASK")
    add("--prompts", type=int, default=10)
    add("--commit", help="what is measured, where the tree is no git checkout")
    add("--time-limit", type=float, default=600, help="seconds: prompts beyond them are left out")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Model(args.model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    prompts: list[dict[float, dict[str, Any]]] = []
    lengths: list[int] = []
    for number in range(args.prompts):
        task = args.tasks[number % len(args.tasks)]
        prompt = fitted(TASKS[task], f"reuse {number} {task}", args.length, model.tokenizer)
        if model.answer(prompt.token_ids, min(TASKS[task].max_tokens, 96)):
            prompts.append({share: look(model, share) for share in BUDGETS})
            lengths.append(model.length)
        elapsed = time.monotonic() - began
        print(f"prompt {number + 1} of {args.prompts}, {elapsed:.0f} s", file=sys.stderr)
        if elapsed > args.time_limit:
            break
    if not prompts:
        raise SystemExit("every answer was empty")
    command = command_line("benchmarks.answers.reuse", argv)
    what = "What a selection finds that was made for an earlier layer or step."
    rows = summarise(prompts)
    results = {
        "about": about(what, command, args.commit, ("transformers",)),
        "model": args.model.name,
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "tokens": lengths,
        "rows": rows,
        "seconds": round(time.monotonic() - began, 1),
    }
    write_json(args.out, results)
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
