"""Times the retrieval ops of one layer against bytes, against each other, and against stock.

`python -m benchmarks.ops.retrieval --output NAME.json` on a GPU. One layer of Llama-3.1-8B's shape
in bf16, over a cache of bf16 or (`--kv-cache-dtype fp8`) e4m3, every request of the same length.
Each operator is captured in a CUDA graph and replayed, its L2 cold but for what the operator before
it left. `ideal_us` is for the bytes that the operator has to move; `of_bandwidth` is its share of
the time. `stock` is FlashAttention as vLLM calls it in decode. `overlapped`, `apart`, `unfused` and
`N CTAs` are variants (``cuda.OVERLAP_ROWS``, ``topk.FUSED``, ``cuda.select``,
``Scratch.attend_programs``). Blocks are anywhere, as in a pool long in use, or `--in-order`. Long
cases share blocks between requests once memory runs out, and say so.

`--crossover` measures in place of that from which length on a layer is faster than stock, for
several shapes: see ``retrieval_crossover``.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.ops import retrieval_crossover
from benchmarks.ops.retrieval_layer import (
    DTYPE,
    GROUP,
    INDEX,
    LLAMA_8B,
    ON_GPU,
    Layer,
    add_ops,
    head_of,
    measure,
    nothing,
    stock_attention,
)
from benchmarks.ops.retrieval_others import Operators, references, top_k, xformers_attention
from benchmarks.ops.saliency import bytes_per_us

# The references copy all keys out, row by row.
MAX_TORCH_ENTRIES = 1_100_000
# Attention to a selection costs the same at all lengths.
PAGED_LENGTH, PAGES = 130_000, (16, 64)


def case(
    length: int,
    batch: int,
    budget: int,
    backends: list[str],
    repeats: int,
    in_order: bool,
    bandwidth: float,
    kv_dtype: torch.dtype,
) -> dict[str, Any]:
    """Every operator at one size."""
    layer = Layer(LLAMA_8B, length, batch, in_order, kv_dtype)
    step = layer.decode(length, batch, budget)
    kv_heads = LLAMA_8B.kv_heads
    operators: Operators = {"stock": stock_attention(step)}
    # Scores are counted as they are made, and the selection reads scores that are still in L2.
    before: Operators = {}
    for backend in backends:
        add_ops(step, backend, operators, before)
    of_others, touch = top_k(batch * kv_heads, length, budget)
    operators.update(of_others)
    before.update(dict.fromkeys(of_others, touch))
    by_row: Operators = {}
    is_wide = kv_dtype == DTYPE
    if is_wide and length * batch <= MAX_TORCH_ENTRIES:
        by_row = references(
            INDEX, step.query, layer.paged, layer.sidecar, step.table, length, budget
        )
        operators.update(by_row)
    if is_wide and length == PAGED_LENGTH:
        for page in PAGES:
            try:
                operators.update(xformers_attention(step.query, kv_heads, budget, page))
            except ImportError as error:
                print(f"xformers is left out: {error}", file=sys.stderr)
    report: dict[str, Any] = {"blocks_shared": layer.shared}
    for name, run in operators.items():
        try:
            first = before.get(name, nothing)
            us = measure(run, repeats, captured=name not in by_row, before=first)
        except Exception as error:
            report[name] = {"error": str(error).splitlines()[0]}
            continue
        ideal = step.bytes_of(name.partition("/")[0]) / bandwidth
        report[name] = {"us": round(us, 2), "ideal_us": round(ideal, 2)}
        report[name]["of_bandwidth"] = round(ideal / us, 3)
    return report


def write_case(
    length: int, repeats: int, bandwidth: float, kv_dtype: torch.dtype
) -> dict[str, float]:
    """Quantising a whole prompt in one layer."""
    layer = Layer(LLAMA_8B, length, 1, kv_dtype=kv_dtype)
    jobs = layer.jobs(0, 0, length // GROUP)
    us = measure(lambda: layer.writer.write(jobs, layer.pointers, layer.strides), repeats)
    dim = LLAMA_8B.head_dim
    ideal = length * LLAMA_8B.kv_heads * (layer.entry_bytes // 2 + dim // 4) / bandwidth
    return {"us": round(us, 2), "ideal_us": round(ideal, 2), "of_bandwidth": round(ideal / us, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the report here as JSON")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 130_000, 524_288])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--backends", nargs="+", default=["cuda", "triton"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--kv-cache-dtype",
        choices=["auto", "fp8"],
        default="auto",
        help="fp8 is e4m3",
    )
    parser.add_argument("--in-order", action="store_true", help="blocks of a request side by side")
    parser.add_argument("--commit", help="what is measured, where the tree is no git checkout")
    add = parser.add_argument
    add("--crossover", action="store_true", help="from which length on retrieval is faster")
    add("--dry", action="store_true", help="with --crossover: tiny sizes, also on a CPU")
    add("--time-limit", type=float, default=140, help="seconds, of --crossover")
    args = parser.parse_args()
    if not (ON_GPU or (args.crossover and args.dry)):
        parser.error("times are those of a GPU, and there is none")
    what = "The three ops of retrieval in one layer, beside what else does such work."
    if args.crossover:
        what = "From which length on a layer that retrieves is faster than stock attention."
    head = head_of(what, "benchmarks.ops.retrieval", args.commit)
    if args.crossover:
        retrieval_crossover.main(head, args.output, args.repeats, args.dry, args.time_limit)
        return
    bandwidth = bytes_per_us(torch.cuda.get_device_name())
    kv_dtype = torch.float8_e4m3fn if args.kv_cache_dtype == "fp8" else DTYPE
    report: dict[str, Any] = head | {
        "budget": args.budget,
        "bytes_per_us": bandwidth,
        "kv_cache_dtype": args.kv_cache_dtype,
        "cases": {},
        "write": {},
    }

    def save() -> None:
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    for length in args.lengths:
        report["write"][str(length)] = write_case(length, args.repeats, bandwidth, kv_dtype)
        for batch in args.batches:
            sizes = (length, batch, args.budget, args.backends)
            result = case(*sizes, args.repeats, args.in_order, bandwidth, kv_dtype)
            report["cases"][f"{batch}x{length}"] = result
            times = {
                k: v.get("us", v.get("error")) for k, v in result.items() if isinstance(v, dict)
            }
            print(f"{batch} x {length}:", json.dumps(times), flush=True)
            save()
            torch.cuda.empty_cache()
    print("write:", json.dumps(report["write"]))


if __name__ == "__main__":
    main()
