"""From which length on a layer that retrieves is faster than one with stock attention.

`python -m benchmarks.ops.retrieval --crossover --output NAME.json`, on a GPU, in about two minutes.
Shapes of 64 and 128 channels with 2, 4 and 8 KV heads, bf16, one request and eight: FlashAttention
as vLLM calls it in decode against our three operators together, each a CUDA graph replayed with a
cold L2. A crossover is the least length measured from which on ours takes less time at all lengths.
What comes out belongs into ``vllm_kvx/ops/retrieval/crossover.py``.
"""

import gc
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.ops.retrieval_layer import (
    DEVICE,
    ON_GPU,
    Heads,
    Layer,
    measure,
    scratch_of,
    stock_attention,
)
from vllm_kvx.ops.retrieval import cuda, retrieve

# Qwen2.5's query heads: 0.5B, 7B's share, 8 KV heads; 1.5B, 7B, Llama-3.1-8B.
SHAPES = (
    *(Heads(14, 2, 64), Heads(28, 4, 64), Heads(32, 8, 64)),
    *(Heads(12, 2, 128), Heads(28, 4, 128), Heads(32, 8, 128)),
)
# Lengths by batch; both take the same blocks.
LENGTHS = {
    1: (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512),
    8: (2, 4, 8, 16, 32, 64, 128),
}
# Triton's operators take longest to compile, and the time hardly depends on the budget.
BUDGETS = {"cuda": (256, 512, 1024, 2048), "triton": (512, 2048), "torch": (16, 32)}
# The table in the code holds for budgets of up to this many tokens.
TABLE_BUDGET = 2048
_KIB = 1024
Case = dict[str, Any]


def crossover_of(cases: list[Case], backend: str, budget: int) -> int | None:
    """The least length from which on retrieval is faster in all `cases`; None if it is in none."""
    found = None
    for case in sorted(cases, key=lambda case: -case["length"]):
        times = case.get(backend, {})
        if str(budget) not in times or times[str(budget)] >= case["stock"]:
            break
        found = case["length"]
    return found


def crossovers(cases: list[Case], backends: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row for each shape, backend and batch: the crossover by budget."""
    rows = []
    shapes, batches = (dict.fromkeys(case[key] for case in cases) for key in ("shape", "batch"))
    for backend, batch, shape in product(backends, batches, shapes):
        mine = [c for c in cases if c["shape"] == shape and c["batch"] == batch and backend in c]
        if not mine:
            continue
        row = {key: mine[0][key] for key in ("shape", "kv_heads", "head_bytes")}
        by_budget = {str(b): crossover_of(mine, backend, b) for b in BUDGETS[backend]}
        rows.append(row | {"backend": backend, "batch": batch, "crossover": by_budget})
    return rows


def table(report: dict[str, Any]) -> str:
    """Times by length and crossovers, and the rows of the table in the code."""
    lines = []
    for row in report["crossovers"]:
        backend, batch = row["backend"], row["batch"]
        lines.append(f"{row['shape']}, {batch} request(s), {backend}: from {row['crossover']}")
        for case in report["cases"]:
            if (case["shape"], case["batch"]) == (row["shape"], batch) and backend in case:
                ours = ", ".join(f"{b}: {us:.1f}" for b, us in case[backend].items())
                lines.append(f"  {case['length']:7} stock {case['stock']:7.1f} us; {ours}")
    for row in report["crossovers"]:
        if row["batch"] == 1 and row["crossover"].get(str(TABLE_BUDGET)):
            key = row["kv_heads"], row["head_bytes"]
            lines.append(f"{row['backend']}: {key}: {row['crossover'][str(TABLE_BUDGET)]:_},")
    return "\n".join(lines)


def plan(dry: bool) -> tuple[tuple[str, ...], tuple[Heads, ...], dict[int, tuple[int, ...]]]:
    """Backends, shapes, and by batch the lengths in tokens."""
    if dry:
        return ("torch",), (Heads(4, 2, 64), Heads(2, 1, 128)), {1: (64, 128), 2: (64,)}
    missing = cuda.why_not()
    if missing:
        print(f"CUDA ops are left out: {missing}", file=sys.stderr)
    lengths = {batch: tuple(n * _KIB for n in every) for batch, every in LENGTHS.items()}
    return ("triton",) if missing else ("cuda", "triton"), SHAPES, lengths


def measured(
    shape: Heads,
    backend: str,
    lengths: dict[int, tuple[int, ...]],
    cases: dict[tuple[str, int, int], Case],
    repeats: int,
) -> Iterator[None]:
    """Fills in `cases`, by shape, batch and length; yields after each."""
    most = max(batch * max(every) for batch, every in lengths.items())
    layer = Layer(shape, most, 1)
    rows = max(lengths)
    scratches = {
        budget: scratch_of(shape, backend, rows, most + 4 * rows, budget)
        for budget in BUDGETS[backend]
    }
    for batch, every in lengths.items():
        for length in every:
            key = str(shape), batch, length
            case = cases.setdefault(
                key,
                {
                    "shape": str(shape),
                    "kv_heads": shape.kv_heads,
                    "head_bytes": layer.entry_bytes,
                    "batch": batch,
                    "length": length,
                },
            )
            step = layer.decode(length, batch, 1)
            if "stock" not in case:
                case["stock"] = round(measure(stock_attention(step), repeats), 2)
            times = {}
            for budget, scratch in scratches.items():
                if budget >= length:
                    continue
                step = layer.decode(length, batch, budget)
                us = measure(
                    partial(step.made_with, retrieve.retrieve, scratch),
                    repeats,
                    before=scratch.histogram.zero_,
                )
                times[str(budget)] = round(us, 2)
            case[backend] = times
            yield


def main(
    about: dict[str, Any], output: Path | None, repeats: int, dry: bool, time_limit: float
) -> None:
    """Measures until the time is up, CUDA ops first; saves and prints what there is."""
    began = time.monotonic()
    backends, shapes, lengths = plan(dry)
    cases: dict[tuple[str, int, int], Case] = {}
    report: dict[str, Any] = about | {"complete": False}

    def save() -> None:
        report["seconds"] = round(time.monotonic() - began, 1)
        report["cases"] = list(cases.values())
        report["crossovers"] = crossovers(report["cases"], backends)
        if output:
            output.write_text(json.dumps(report, indent=1) + "\n")

    def run() -> str:
        for backend, shape in product(backends, shapes):
            for _ in measured(shape, backend, lengths, cases, repeats):
                if time.monotonic() - began > time_limit:
                    return f"stopped after {time_limit:.0f} s, in {backend}, {shape}"
            save()
            print(f"{backend}, {shape}: {report['seconds']} s", file=sys.stderr, flush=True)
            if ON_GPU:
                torch.cuda.empty_cache()
        return ""

    # Each capture collects garbage, which takes longer than what is captured.
    gc.collect()
    gc.freeze()
    try:
        stopped = run()
    finally:
        gc.unfreeze()
    report["complete"] = not stopped
    save()
    print(table(report))
    print(f"{len(cases)} cases on {DEVICE} in {report['seconds']} s")
    if stopped:
        raise SystemExit(stopped)
