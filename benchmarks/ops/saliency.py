"""Times the retention kernels of one layer against the bytes that they have to move.

`python -m benchmarks.ops.saliency --output NAME.json` on a GPU. One request of Llama-3.1-8B's shape
in bf16: window 8, kernel 7, a tenth of the entries kept. Each operator is captured in a CUDA graph,
so that its launches cost no host time, and replayed with a cold L2; `host_us` is what queueing it
eagerly costs the host. `ideal_us` is for bytes that no implementation can avoid: keys read once
(the exact softmax reads them twice), scores read and written once, moved entries likewise.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.about import about, command_line
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.move import move_entries
from vllm_kvx.ops.prompt.pool import pool_per_kv_head
from vllm_kvx.ops.prompt.saliency import window_saliency
from vllm_kvx.ops.prompt.select import select_kept, select_moves
from vllm_kvx.ops.radix import splits_of

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
WINDOW, KERNEL, KV_RATE = 8, 7, 0.1
# By what CUDA calls a card: nine tenths of its data sheet's 4.8, 3.35, 2.039 and 1.555 TB/s.
_BYTES_PER_US = {
    "NVIDIA H200": 4.3e6,
    "NVIDIA H100 80GB HBM3": 3.0e6,
    "NVIDIA A100-SXM4-80GB": 1.8e6,
    "NVIDIA A100-SXM4-40GB": 1.4e6,
}
_FLUSH_BYTES = 256 << 20


def bytes_per_us(card: str) -> float:
    """About what a card moves in a microsecond; `card` as CUDA names it.

    Raises:
        ValueError: a card without a figure here.
    """
    if card not in _BYTES_PER_US:
        raise ValueError(f"no bandwidth of {card!r} is known: add it to benchmarks/ops/saliency.py")
    return _BYTES_PER_US[card]


def measure(operator: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Medians in microseconds: of the device's work, and of the host's to queue it."""
    operator()
    torch.cuda.synchronize()
    host = []
    for _ in range(repeats):
        began = time.perf_counter()
        operator()
        host.append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    device = []
    for _ in range(repeats):
        flush.zero_()
        began_event, ended_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began_event.record()
        graph.replay()
        ended_event.record()
        torch.cuda.synchronize()
        device.append(began_event.elapsed_time(ended_event) * 1e3)
    return {"gpu_us": statistics.median(device), "host_us": statistics.median(host)}


def case(num_keys: int, repeats: int) -> dict[str, dict[str, float]]:
    """Every operator on one request of `num_keys` keys."""
    num_blocks = -(-num_keys // BLOCK_SIZE)
    # As FlashAttention's cache lies in memory: the heads of an entry side by side.
    shape = (num_blocks, BLOCK_SIZE, KV_HEADS, 2 * HEAD_DIM)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    paged = PagedKV.of(cache, HEAD_DIM)
    table = torch.randperm(num_blocks, device="cuda").int()[None]
    shape = (1, WINDOW, HEADS, HEAD_DIM)
    queries = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    cap = max(int(num_keys * KV_RATE), WINDOW)

    def sizes(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device="cuda")

    lengths, windows, caps, kernels = sizes(num_keys), sizes(WINDOW), sizes(cap), sizes(KERNEL)
    offsets = sizes(0, num_keys, dtype=torch.int64)
    out_offsets = sizes(0, cap, dtype=torch.int64)

    def score() -> torch.Tensor:
        return window_saliency(
            queries,
            paged,
            table,
            lengths,
            windows,
            offsets,
            num_keys,
            num_keys,
            HEAD_DIM**-0.5,
        )

    scores = score()

    def pool() -> torch.Tensor:
        return pool_per_kv_head(
            scores, KV_HEADS, lengths, windows, offsets, kernels, num_keys, unpooled
        )

    unpooled = torch.empty(KV_HEADS, num_keys, device="cuda")
    pooled = pool()
    selection = (pooled, lengths, windows, caps, offsets, out_offsets, cap)
    moves = select_moves(*selection, unpooled=unpooled)
    # Repeating the moves changes nothing: what they read is never written.
    operators: dict[str, tuple[Callable[[], Any], float]] = {
        "window_saliency": (score, num_keys * KV_HEADS * HEAD_DIM * 2),
        "pool_per_kv_head": (pool, num_keys * (HEADS + 2 * KV_HEADS) * 4),
        "select_kept": (
            lambda: select_kept(*selection, unpooled=unpooled),
            num_keys * KV_HEADS * 4,
        ),
        "select_moves": (
            lambda: select_moves(*selection, unpooled=unpooled),
            num_keys * KV_HEADS * 4,
        ),
        "select_moves, ties by index": (
            lambda: select_moves(*selection),
            num_keys * KV_HEADS * 4,
        ),
        # Bounds by many programs: see SHARED_FROM in ops/radix.py.
        "select_moves, shared": (
            lambda: select_moves(*selection, unpooled=unpooled, splits=splits_of(KV_HEADS)),
            num_keys * KV_HEADS * 4,
        ),
        "move_entries": (
            lambda: move_entries(paged, table, *moves, out_offsets, cap),
            int(moves[2].sum()) * 2 * HEAD_DIM * 2 * 2,
        ),
    }
    bandwidth = bytes_per_us(torch.cuda.get_device_name())
    report = {}
    for name, (operator, num_bytes) in operators.items():
        times = measure(operator, repeats)
        ideal = num_bytes / bandwidth
        report[name] = {**times, "ideal_us": ideal, "times_ideal": times["gpu_us"] / ideal}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the report here as JSON")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 130_000])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", help="what is measured, where the tree is no git checkout")
    args = parser.parse_args()
    report = {
        "about": about(
            "The operators that score and select a prompt's entries, beside their bytes.",
            command_line("benchmarks.ops.saliency", sys.argv[1:]),
            args.commit,
        ),
        "cases": {str(length): case(length, args.repeats) for length in args.lengths},
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
