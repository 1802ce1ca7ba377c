"""Times the retrieval ops of one layer against bytes, against each other, and against stock.

`python -m benchmarks.retrieval --output NAME.json` on a GPU. One layer of Llama-3.1-8B's shape in
bf16, every request of the same length. Each operator is captured in a CUDA graph and replayed, its
L2 cold but for what the operator before it left. `ideal_us` is for the bytes that the operator has
to move; `of_bandwidth` is its share of the time. `stock` is FlashAttention as vLLM calls it in
decode. Long cases share blocks between requests once memory runs out, and say so.
"""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import vllm

from benchmarks.compare import git_commit
from benchmarks.retrieval_others import Operators, references, top_k, xformers_attention
from benchmarks.saliency import BYTES_PER_US
from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval import retrieve
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.ops.retrieval.sidecar import PageShape

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, GROUP = 32, 8, 128, 32, 32
INDEX = INDEXES["one_bit"]
# A request's cache is its own up to this much in all.
MAX_CACHE_BYTES = 24 << 30
# The references copy all keys out, row by row.
MAX_TORCH_ENTRIES = 1_100_000
# Attention to a selection costs the same at all lengths.
PAGED_LENGTH, PAGES = 130_000, (16, 64)
_FLUSH_BYTES = 256 << 20


def measure(
    operator: Callable[[], Any],
    repeats: int,
    captured: bool = True,
    before: Callable[[], Any] = lambda: None,
) -> float:
    """Median microseconds of one call, replayed as a CUDA graph if `captured`.

    before: what runs first each time, not timed, after L2 has been emptied.
    """
    before()
    operator()
    torch.cuda.synchronize()
    run = operator
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            operator()
        run = graph.replay
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    samples = []
    for _ in range(repeats):
        flush.zero_()
        before()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        samples.append(began.elapsed_time(ended) * 1e3)
    return statistics.median(samples)


class Layer:
    """One layer's cache, filled, with its sidecar, for `batch` requests of `length` entries."""

    def __init__(self, length: int, batch: int, budget: int) -> None:
        shape = PageShape(KV_HEADS, BLOCK_SIZE, HEAD_DIM, GROUP)
        page = KV_HEADS * BLOCK_SIZE * 2 * HEAD_DIM * 2
        stride = page + INDEX.page_bytes(shape)
        per_request = -(-length // BLOCK_SIZE)
        blocks = min(per_request * batch, max(MAX_CACHE_BYTES // stride, per_request))
        self.shared = blocks < per_request * batch
        raw = torch.empty(blocks * stride, dtype=torch.uint8, device="cuda")
        # As FlashAttention's cache lies in memory: the heads of an entry side by side.
        entry = 2 * HEAD_DIM * 2
        cache = torch.as_strided(
            raw,
            (blocks, KV_HEADS, BLOCK_SIZE, entry),
            (stride, entry, KV_HEADS * entry, 1),
        ).view(torch.bfloat16)
        for first in range(0, blocks, 4096):
            cache[first : first + 4096].normal_()
        self.cache = cache
        self.paged, self.sidecar = PagedKV.of(cache, HEAD_DIM), INDEX.view(cache, shape)
        order = torch.randperm(blocks, device="cuda").int()
        index = torch.arange(per_request * batch, device="cuda") % blocks
        self.table = order[index].view(batch, per_request).contiguous()
        self.writer = INDEX.writer([(self.paged, self.sidecar)], [0], [0])
        self.pointers = torch.tensor(
            [self.table.data_ptr()], dtype=torch.int64, device="cuda"
        ).view(torch.uint64)
        self.strides = torch.tensor([self.table.stride(0)], device="cuda")
        for request in range(batch):
            self.write(request, 0, length // GROUP)
        self.query = torch.randn(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.query)
        lens = np.full(batch, length)
        index = np.arange(batch)
        self.rows = RetrievalRows.of(
            index, index, lens, np.full(batch, budget), 1, torch.device("cuda")
        )
        self.length, self.batch, self.budget = length, batch, budget

    def write(self, request: int, first: int, last: int) -> None:
        groups = torch.arange(first, last, dtype=torch.int32, device="cuda")
        jobs = torch.stack([torch.zeros_like(groups), torch.full_like(groups, request), groups], 1)
        self.writer.write(jobs.contiguous(), self.pointers, self.strides)

    def scratch(self, backend: str) -> retrieve.Scratch:
        return retrieve.Scratch.of(
            INDEX,
            num_heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_rows=self.batch,
            capacity=self.batch * (self.length + 4),
            max_units=self.budget,
            unit=1,
            reduction="max",
            device=torch.device("cuda"),
            backend=backend,
        )

    def bytes_of(self, op: str) -> float:
        """Bytes that the operator has to move."""
        codes = self.length * (HEAD_DIM // 8 + 4 * HEAD_DIM // GROUP)
        per_head = {
            "score": codes + 4 * self.length,
            "select": 4 * self.length + 4 * self.budget,
            "attend": self.budget * 2 * HEAD_DIM * 2,
        }
        per_head["all"] = codes + self.budget * 2 * HEAD_DIM * 2
        per_head["stock"] = self.length * 2 * HEAD_DIM * 2
        return float(self.batch * KV_HEADS * per_head[op])


def stock_attention(layer: Layer) -> Callable[[], Any]:
    """Decode as vLLM's FlashAttention backend calls it, its scheduler metadata made before."""
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
        get_scheduler_metadata,
    )

    version = get_flash_attn_version()
    lens = torch.full((layer.batch,), layer.length, dtype=torch.int32, device="cuda")
    starts = torch.arange(layer.batch + 1, dtype=torch.int32, device="cuda")
    splits = 32  # vLLM's bound under CUDA graphs.
    metadata = get_scheduler_metadata(
        batch_size=layer.batch,
        max_seqlen_q=1,
        max_seqlen_k=layer.length,
        num_heads_q=HEADS,
        num_heads_kv=KV_HEADS,
        headdim=HEAD_DIM,
        cache_seqlens=lens,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=starts,
        page_size=BLOCK_SIZE,
        causal=True,
        window_size=(-1, -1),
        num_splits=splits,
    )
    keys = layer.paged.keys.transpose(1, 2)
    values = layer.paged.values.transpose(1, 2)

    def run() -> Any:
        return flash_attn_varlen_func(
            q=layer.query,
            k=keys,
            v=values,
            out=layer.out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=lens,
            max_seqlen_k=layer.length,
            softmax_scale=HEAD_DIM**-0.5,
            causal=True,
            block_table=layer.table,
            scheduler_metadata=metadata,
            num_splits=splits,
            fa_version=version,
        )

    return run


def case(length: int, batch: int, budget: int, backends: list[str], repeats: int) -> dict[str, Any]:
    """Every operator at one size."""
    layer = Layer(length, batch, budget)
    operators: Operators = {"stock": stock_attention(layer)}
    # Scores are counted as they are made, and the selection reads scores that are still in L2.
    before: Operators = {}
    for backend in backends:
        add_ops(layer, backend, operators, before)
    of_others, touch = top_k(batch * KV_HEADS, length, budget)
    operators.update(of_others)
    before.update(dict.fromkeys(of_others, touch))
    by_row: Operators = {}
    if length * batch <= MAX_TORCH_ENTRIES:
        by_row = references(
            INDEX, layer.query, layer.paged, layer.sidecar, layer.table, length, budget
        )
        operators.update(by_row)
    if length == PAGED_LENGTH:
        for page in PAGES:
            try:
                operators.update(xformers_attention(layer.query, KV_HEADS, budget, page))
            except ImportError as error:
                print(f"xformers is left out: {error}", file=sys.stderr)
    report: dict[str, Any] = {"blocks_shared": layer.shared}
    for name, run in operators.items():
        try:
            first = before.get(name, lambda: None)
            us = measure(run, repeats, captured=name not in by_row, before=first)
        except Exception as error:
            report[name] = {"error": str(error).splitlines()[0]}
            continue
        ideal = layer.bytes_of(name.partition("/")[0]) / BYTES_PER_US
        report[name] = {"us": round(us, 2), "ideal_us": round(ideal, 2)}
        report[name]["of_bandwidth"] = round(ideal / us, 3)
    return report


def add_ops(layer: Layer, backend: str, operators: Operators, before: Operators) -> None:
    """One backend's three operators and all of them, and what comes before each."""
    scratch = layer.scratch(backend)

    def made_with(call: Callable[..., Any]) -> Any:
        return call(
            layer.query,
            layer.paged,
            layer.sidecar,
            layer.table,
            layer.rows,
            scratch,
            layer.out,
            scale=HEAD_DIM**-0.5,
            key_scale=1.0,
            value_scale=1.0,
        )

    done: list[Callable[[], Any]] = [scratch.histogram.zero_]
    for name, run in made_with(retrieve.steps).items():
        operators[f"{name}/{backend}"] = run
        earlier = list(done)
        before[f"{name}/{backend}"] = lambda earlier=earlier: [run() for run in earlier]
        done.append(run)
    operators[f"all/{backend}"] = lambda: made_with(retrieve.retrieve)
    before[f"all/{backend}"] = done[0]


def write_case(length: int, repeats: int) -> dict[str, float]:
    """Quantising a whole prompt in one layer."""
    layer = Layer(length, 1, 64)
    groups = torch.arange(length // GROUP, dtype=torch.int32, device="cuda")
    jobs = torch.stack([torch.zeros_like(groups), torch.zeros_like(groups), groups], 1).contiguous()
    us = measure(lambda: layer.writer.write(jobs, layer.pointers, layer.strides), repeats)
    ideal = length * KV_HEADS * (HEAD_DIM * 2 + HEAD_DIM // 4) / BYTES_PER_US
    return {"us": round(us, 2), "ideal_us": round(ideal, 2), "of_bandwidth": round(ideal / us, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the report here as JSON")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 130_000, 524_288])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--backends", nargs="+", default=["cuda", "triton"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--commit", help="what is measured, where the tree is no git checkout")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "command": f"python -m benchmarks.retrieval {' '.join(sys.argv[1:])}".strip(),
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or git_commit(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "budget": args.budget,
        "bytes_per_us": BYTES_PER_US,
        "cases": {},
        "write": {},
    }

    def save() -> None:
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    for length in args.lengths:
        report["write"][str(length)] = write_case(length, args.repeats)
        for batch in args.batches:
            result = case(length, batch, args.budget, args.backends, args.repeats)
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
