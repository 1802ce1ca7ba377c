"""One layer's cache with its sidecar, and how its operators are timed; retrieval's benchmarks.

On a GPU caches are bfloat16 and each operator is a CUDA graph, replayed with a cold L2. On a CPU
they are float32 and times mean nothing: that only tries whether a benchmark runs.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from benchmarks.common.about import about, command_line
from benchmarks.ops.retrieval_others import Operators
from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval import retrieve
from vllm_kvx.ops.retrieval.attend import attend_reference
from vllm_kvx.ops.retrieval.index_layout import PageShape
from vllm_kvx.ops.retrieval.rows import RetrievalRows

BLOCK_SIZE, GROUP = 32, 32
INDEX = INDEXES["one_bit"]
# A request's cache is its own up to this much in all.
MAX_CACHE_BYTES = 24 << 30
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
_FLUSH_BYTES = 256 << 20
# Variants of the selection: how many share a row and KV head. And of attention: how many in all.
SELECT_CTAS = (1, 2, 4, 8)
ATTEND_CTAS = (132, 264, 528)
Call = Callable[[], Any]


def head_of(what: str, module: str, commit: str | None) -> dict[str, Any]:
    """What a result file begins with; commit: where the tree is no git checkout."""
    return {"about": about(what, command_line(module, sys.argv[1:]), commit, ("triton",))}


def nothing() -> None:
    """What runs before an operator that needs nothing before it."""


@lru_cache(maxsize=1)
def _flush() -> torch.Tensor:
    return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)


def run_all(operators: Sequence[Call]) -> None:
    for operator in operators:
        operator()


def measure(operator: Call, repeats: int, captured: bool = True, before: Call = nothing) -> float:
    """Median microseconds of one call, replayed as a CUDA graph if `captured`.

    before: what runs first each time, not timed, after L2 has been emptied.
    """
    before()
    operator()
    if not ON_GPU:
        began = time.perf_counter()
        operator()
        return (time.perf_counter() - began) * 1e6
    torch.cuda.synchronize()
    run = operator
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            operator()
        run = graph.replay
    samples = []
    for _ in range(repeats):
        _flush().zero_()
        before()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        samples.append(first.elapsed_time(last) * 1e3)
    return statistics.median(samples)


@dataclass(frozen=True)
class Heads:
    """A layer's shape: query heads, KV heads, and channels of a head; and entries of a block."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = BLOCK_SIZE

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"

    @property
    def page_shape(self) -> PageShape:
        return PageShape(self.kv_heads, self.block_size, self.head_dim, GROUP)


LLAMA_8B = Heads(32, 8, 128)
# Of two ranks, each.
LLAMA_8B_OF_2 = Heads(16, 4, 128)
# vLLM makes its blocks so long, beside layers that keep a state.
QWEN3_NEXT = Heads(16, 2, 256, block_size=544)


def block_bytes(shape: Heads, kv_dtype: torch.dtype = DTYPE) -> int:
    """Bytes of a block of one layer, its sidecar included."""
    entry = 2 * shape.head_dim * kv_dtype.itemsize
    return shape.kv_heads * shape.block_size * entry + INDEX.page_bytes(shape.page_shape)


class Layer:
    """One layer's cache, filled, with its sidecar, for `batch` requests of `length` entries.

    in_order: blocks of a request lie one after the other, and not anywhere. kv_dtype: of the
    cache. entry_bytes: of a key and a value of one KV head.
    """

    def __init__(
        self,
        shape: Heads,
        length: int,
        batch: int,
        in_order: bool = False,
        kv_dtype: torch.dtype = DTYPE,
    ) -> None:
        self.shape, self.length, self.batch = shape, length, batch
        self.entry_bytes = entry = 2 * shape.head_dim * kv_dtype.itemsize
        stride = block_bytes(shape, kv_dtype)
        per_request = -(-length // shape.block_size)
        blocks = min(per_request * batch, max(MAX_CACHE_BYTES // stride, per_request))
        self.shared = blocks < per_request * batch
        raw = torch.empty(blocks * stride, dtype=torch.uint8, device=DEVICE)
        # As FlashAttention's cache lies in memory: the heads of an entry side by side.
        cache = torch.as_strided(
            raw,
            (blocks, shape.kv_heads, shape.block_size, entry),
            (stride, entry, shape.kv_heads * entry, 1),
        ).view(kv_dtype)
        for first in range(0, blocks, 4096):
            part = cache[first : first + 4096]
            part.copy_(torch.randn(part.shape, dtype=DTYPE, device=DEVICE).to(kv_dtype))
        self.cache = cache
        self.paged = PagedKV.of(cache, shape.head_dim)
        self.sidecar = INDEX.view(cache, shape.page_shape)
        order = (torch.arange if in_order else torch.randperm)(blocks, device=DEVICE).int()
        index = torch.arange(per_request * batch, device=DEVICE) % blocks
        self.table = order[index].view(batch, per_request).contiguous()
        if ON_GPU:
            self.writer = INDEX.writer([(self.paged, self.sidecar)], [0], [0])
            self.pointers = torch.tensor(
                [self.table.data_ptr()], dtype=torch.int64, device=DEVICE
            ).view(torch.uint64)
            self.strides = torch.tensor([self.table.stride(0)], device=DEVICE)
        for request in range(batch):
            self.write(request, 0, length // GROUP)

    def write(self, request: int, first: int, last: int) -> None:
        """Quantises groups [first, last) of a request."""
        if not ON_GPU:
            INDEX.write_in_torch(self.paged, self.sidecar, self.table[request], first, last)
            return
        self.writer.write(self.jobs(request, first, last), self.pointers, self.strides)

    def jobs(self, request: int, first: int, last: int) -> torch.Tensor:
        """See ``Writer.write``."""
        groups = torch.arange(first, last, dtype=torch.int32, device=DEVICE)
        jobs = torch.stack([torch.zeros_like(groups), torch.full_like(groups, request), groups], 1)
        return jobs.contiguous()

    def decode(self, length: int, batch: int, budget: int, rows: int = 0) -> "Decode":
        """A step of `batch` requests of `length` entries each, in this layer's blocks.

        rows: of a CUDA graph that is for more requests; those that are over have nothing to do.
        """
        per_request = -(-length // self.shape.block_size)
        table = self.table
        if (length, batch) != (self.length, self.batch):
            table = table.flatten()[: batch * per_request].view(batch, per_request)
        return Decode(self, table, length, budget, max(rows, batch))


class Decode:
    """One decode step of a layer: a query for each request."""

    def __init__(
        self, layer: Layer, table: torch.Tensor, length: int, budget: int, rows: int
    ) -> None:
        self.layer, self.table, self.length, self.budget = layer, table, length, budget
        self.batch = batch = table.shape[0]
        shape = layer.shape
        self.query = torch.randn(batch, shape.heads, shape.head_dim, dtype=DTYPE, device=DEVICE)
        self.out = torch.empty_like(self.query)
        live = np.arange(rows) < batch
        index = np.arange(rows) * live
        self.rows = RetrievalRows.of(index, index, length * live, budget * live, 1, DEVICE)

    def scratch(self, backend: str) -> retrieve.Scratch:
        """For this step alone; larger ones do for several."""
        rows, capacity = len(self.rows.lens), self.batch * (self.length + 4)
        return scratch_of(self.layer.shape, backend, rows, capacity, self.budget)

    def made_with(self, call: Callable[..., Any], scratch: retrieve.Scratch) -> Any:
        """`call`, one of ``retrieve.steps`` and ``retrieve.retrieve``, of this step."""
        return call(
            self.query,
            self.layer.paged,
            self.layer.sidecar,
            self.table,
            self.rows,
            scratch,
            self.out,
            scale=self.layer.shape.head_dim**-0.5,
            key_scale=1.0,
            value_scale=1.0,
        )

    def bytes_of(self, op: str) -> float:
        """Bytes that the operator has to move."""
        dim = self.layer.shape.head_dim
        codes = self.length * (dim // 8 + 4 * dim // GROUP)
        per_head = {
            "score": codes + 4 * self.length,
            "select": 4 * self.length + 4 * self.budget,
            "attend": self.budget * self.layer.entry_bytes,
        }
        per_head["all"] = codes + self.budget * self.layer.entry_bytes
        per_head["stock"] = self.length * self.layer.entry_bytes
        return float(self.batch * self.layer.shape.kv_heads * per_head[op])


def scratch_of(
    shape: Heads, backend: str, max_rows: int, capacity: int, budget: int
) -> retrieve.Scratch:
    """Scratch of a server whose policy has this budget."""
    return retrieve.Scratch.of(
        INDEX,
        num_heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_rows=max_rows,
        capacity=capacity,
        max_units=budget,
        unit=1,
        reduction="max",
        device=DEVICE,
        backend=backend,
        dtype=DTYPE,
    )


def add_ops(step: Decode, backend: str, operators: Operators, before: Operators) -> None:
    """One backend's three operators and all of them, and what comes before each.

    backend: cuda or triton.
    """
    scratch = step.scratch(backend)
    done: list[Call] = [scratch.histogram.zero_]
    for name, run in step.made_with(retrieve.steps, scratch).items():
        operators[f"{name}/{backend}"] = run
        earlier = list(done)
        before[f"{name}/{backend}"] = partial(run_all, earlier)
        done.append(run)
    operators[f"all/{backend}"] = partial(step.made_with, retrieve.retrieve, scratch)
    before[f"all/{backend}"] = done[0]
    # What runs otherwise, for the number of rows or at all: apart from one launch, of the three.
    scratch = scratch.that_chooses
    if backend == "cuda":
        operators["all/cuda three"] = partial(step.made_with, retrieve.retrieve, scratch)
        before["all/cuda three"] = done[0]
    name, other = {
        "cuda": ("overlapped", replace(scratch, overlap_rows=1 << 30)),
        "triton": ("unfused", replace(scratch, fused=False)),
    }[backend]
    operators[f"all/{backend} {name}"] = lambda: step.made_with(retrieve.retrieve, other)
    before[f"all/{backend} {name}"] = done[0]
    if backend == "cuda":
        apart = replace(scratch, overlap_rows=0)
        operators["all/cuda apart"] = lambda: step.made_with(retrieve.retrieve, apart)
        before["all/cuda apart"] = done[0]
        for ctas in SELECT_CTAS:
            shared = replace(scratch, select_ctas=ctas)
            select, every = f"select/cuda {ctas} CTAs", f"all/cuda {ctas} CTAs select"
            operators[select] = step.made_with(retrieve.steps, shared)["select"]
            before[select] = before["select/cuda"]
            operators[every] = partial(step.made_with, retrieve.retrieve, shared)
            before[every] = done[0]
        for ctas in ATTEND_CTAS:
            attend = f"attend/cuda {ctas} CTAs"
            wider = with_attend_ctas(scratch, ctas)
            operators[attend] = step.made_with(retrieve.steps, wider)["attend"]
            before[attend] = before["attend/cuda"]
    else:
        select = f"select/{backend}"
        operators[f"{select} {name}"] = step.made_with(retrieve.steps, other)["select"]
        before[f"{select} {name}"] = before[select]


def with_attend_ctas(scratch: retrieve.Scratch, ctas: int) -> retrieve.Scratch:
    """The same scratch with room for the parts of more CTAs."""
    rows, kv_heads = scratch.counts.shape
    parts = scratch.heads * retrieve.attend_parts(ctas, rows, kv_heads)
    return replace(
        scratch,
        attend_programs=ctas,
        partial=scratch.partial.new_zeros(parts * scratch.head_dim),
        partial_lse=scratch.partial_lse.new_zeros(parts),
    )


def stock_attention(step: Decode) -> Call:
    """Decode as vLLM's FlashAttention backend calls it, its scheduler metadata made before.

    Over an fp8 cache the query is fp8, too, as vLLM quantises it; that is made before.
    """
    shape, batch, length = step.layer.shape, step.batch, step.length
    if not ON_GPU:
        return lambda: attend_reference(
            step.query[0, : shape.heads // shape.kv_heads],
            PagedKV(step.layer.paged.keys[:, :1], step.layer.paged.values[:, :1]),
            step.table[0],
            torch.arange(length),
            shape.head_dim**-0.5,
        )
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
        get_scheduler_metadata,
    )

    version: Any = get_flash_attn_version()
    lens = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    splits = 32  # vLLM's bound under CUDA graphs.
    metadata = get_scheduler_metadata(
        batch_size=batch,
        max_seqlen_q=1,
        max_seqlen_k=length,
        num_heads_q=shape.heads,
        num_heads_kv=shape.kv_heads,
        headdim=shape.head_dim,
        cache_seqlens=lens,
        qkv_dtype=step.layer.cache.dtype,
        cu_seqlens_q=starts,
        page_size=shape.block_size,
        causal=True,
        window_size=(-1, -1),
        num_splits=splits,
    )
    keys = step.layer.paged.keys.transpose(1, 2)
    values = step.layer.paged.values.transpose(1, 2)
    query, one = step.query, None
    if keys.dtype.itemsize == 1:
        query = query.to(keys.dtype)
        one = torch.ones(1, device=DEVICE).expand(batch, shape.kv_heads)

    def run() -> Any:
        return flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=step.out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=lens,
            max_seqlen_k=length,
            softmax_scale=shape.head_dim**-0.5,
            causal=True,
            block_table=step.table,
            scheduler_metadata=metadata,
            num_splits=splits,
            fa_version=version,
            q_descale=one,
            k_descale=one,
            v_descale=one,
        )

    return run
