"""Layers whose keys are in the cache, beside the index that retrieval reads, of many shapes.

Whatever must not be read is NaN or out of range, and so is what is not written yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.ragged import NO_BLOCK
from vllm_kvx.equations.retrieval import (
    num_full_groups,
    page_scores,
    quantize_keys,
    reduce_heads,
    token_scores,
)
from vllm_kvx.indexes.base import AnyIndex
from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.int8.layout import scale_bytes, scales_offset
from vllm_kvx.ops.int8.numbers import quantized
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.index_layout import PageShape, Sidecar
from vllm_kvx.ops.retrieval.rows import RetrievalRows, room_of

ONE_BIT, PAGE_BOUNDS = INDEXES["one_bit"], INDEXES["page_bounds"]


SCALE = 0.2


UNWRITTEN = -7


@dataclass(frozen=True)
class Shape:
    """One layer and its requests.

    Attributes:
        lengths: entries of each request, each with a block table of its own.
        layout: memory order of a page: `hnd`, `nhd` or `cpu`.
        spare: bytes of a page after its sidecar.
    """

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    group: int = 32
    block_size: int = 32
    has_codes: bool = True
    layout: str = "hnd"
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    spare: int = 0

    @property
    def unit(self) -> int:
        return 1 if self.has_codes else self.group

    @property
    def index(self) -> AnyIndex:
        return ONE_BIT if self.has_codes else PAGE_BOUNDS

    @property
    def page(self) -> PageShape:
        return PageShape(self.kv_heads, self.block_size, self.head_dim, self.group)


@dataclass(frozen=True)
class Layer:
    """A layer's cache: entries past a request's length and all sidecars are NaN.

    tables: (F, max_blocks) int32, `NO_BLOCK` past a request's last block.
    """

    shape: Shape
    raw: Tensor
    paged: PagedKV
    sidecar: Sidecar
    tables: Tensor

    @classmethod
    def of(cls, shape: Shape, seed: int, device: str) -> "Layer":
        rng = torch.Generator(device).manual_seed(seed)
        dtype = shape.cache_dtype or shape.dtype
        heads, size, width = shape.kv_heads, shape.block_size, 2 * shape.head_dim
        counts = [-(-length // size) for length in shape.lengths]
        num_blocks = sum(counts) + 2
        page = heads * size * width * dtype.itemsize
        sidecar, int8 = shape.index.page_bytes(shape.page), dtype == torch.int8
        stride = page + sidecar + shape.spare
        if int8:
            stride = scales_offset(page, sidecar) + scale_bytes(heads, size) + shape.spare
        # In every type all ones is NaN.
        raw = torch.full((num_blocks * stride,), 255, dtype=torch.uint8, device=device)
        row = width * dtype.itemsize
        strides = {"nhd": (stride, row, heads * row, 1)}
        kv_cache = torch.as_strided(
            raw,
            (num_blocks, heads, size, row),
            strides.get(shape.layout, (stride, size * row, row, 1)),
        ).view(dtype)
        isa = "vec" if shape.layout == "cpu" else None
        if int8:
            paged = PagedKV.of_int8(kv_cache, shape.head_dim, sidecar)
        else:
            paged = PagedKV.of(kv_cache, shape.head_dim, cpu_isa=isa)
        order = torch.randperm(num_blocks, generator=rng, device=device).int()
        tables = torch.full((len(counts), max(counts) + 1), NO_BLOCK, device=device).int()
        for f, (length, count) in enumerate(zip(shape.lengths, counts, strict=True)):
            tables[f, :count], order = order[:count], order[count:]
            index = torch.arange(length, device=device)
            block, entry = tables[f, index // size].long(), index % size
            for cache, scales in (
                (paged.keys, paged.key_scales),
                (paged.values, paged.value_scales),
            ):
                data = torch.randn(length, heads, shape.head_dim, generator=rng, device=device)
                if scales is not None:
                    cache[block, :, entry], scales[block, :, entry] = quantized(data)
                    continue
                kind = torch.uint8 if dtype.itemsize == 1 else dtype
                cache.view(kind)[block, :, entry] = data.to(dtype).view(kind)
        return cls(shape, raw, paged, shape.index.view(kv_cache, shape.page), tables)

    def keys(self, request: int, length: int) -> Tensor:
        """(G, length, D) float32."""
        raw = self.paged
        if raw.key_scales is not None:
            return raw.dense_keys(self.tables[request], length)
        if raw.keys.dtype.itemsize == 1:  # Not indexed as it is.
            raw = PagedKV(raw.keys.view(torch.uint8), raw.values.view(torch.uint8))
        return raw.dense_keys(self.tables[request], length).view(self.paged.keys.dtype).float()

    def fill(self) -> "Layer":
        """Quantises every full group, by the reference."""
        for f, length in enumerate(self.shape.lengths):
            self.shape.index.write_in_torch(
                self.paged, self.sidecar, self.tables[f], 0, length // self.shape.group
            )
        return self

    def query(self, num_tokens: int, seed: int = 1) -> Tensor:
        """(N, H, D) rows of a wider tensor."""
        rng = torch.Generator(self.raw.device).manual_seed(seed)
        shape = (num_tokens, self.shape.heads + 1, self.shape.head_dim)
        query = torch.randn(shape, generator=rng, device=self.raw.device).to(self.shape.dtype)
        query[:, -1] = float("nan")
        return query[:, :-1]


def pointers(tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Addresses and strides as vLLM's block tables have them."""
    device = tables[0].device
    return (
        torch.tensor([t.data_ptr() for t in tables], dtype=torch.uint64, device=device),
        torch.tensor([t.stride(0) for t in tables], dtype=torch.int64, device=device),
    )


def jobs_of(jobs: list[tuple[int, int, int]], device: str) -> Tensor:
    return torch.tensor(jobs, dtype=torch.int32, device=device).view(-1, 3)


# Lengths around groups and blocks; every head size, group, page and memory order once or more.
SHAPES = [
    Shape((70, 33, 32, 1), heads=4, kv_heads=2, head_dim=64, layout="cpu"),
    Shape((129, 64), heads=1, kv_heads=1, head_dim=128, group=64, block_size=128, layout="nhd"),
    Shape((257, 128), heads=8, kv_heads=1, head_dim=256, group=128, block_size=128, spare=96),
    Shape((97, 65), heads=10, kv_heads=2, head_dim=64, block_size=64, layout="nhd", spare=128),
    Shape((96, 5), heads=7, kv_heads=1, head_dim=32, dtype=torch.bfloat16),
    Shape((63, 130), heads=8, kv_heads=2, head_dim=64, group=64, block_size=64,
          dtype=torch.bfloat16, layout="nhd"),
    Shape((49, 64, 1), heads=4, kv_heads=2, head_dim=64, group=16, has_codes=False, layout="cpu"),
    Shape((90, 17), heads=5, kv_heads=1, head_dim=128, group=8, block_size=64, has_codes=False),
    Shape((200, 65), heads=8, kv_heads=1, head_dim=64, group=64, block_size=64, has_codes=False,
          dtype=torch.bfloat16, layout="nhd"),
    Shape((513, 256), heads=4, kv_heads=1, head_dim=64, group=256, block_size=256, layout="nhd"),
    # Blocks as vLLM makes them beside layers that keep a state: of 17 groups.
    Shape((600, 544), heads=8, kv_heads=1, head_dim=64, block_size=544, layout="nhd", spare=96),
]  # fmt: skip


FP8 = replace(SHAPES[4], cache_dtype=torch.float8_e4m3fn)
# 8-bit integers with scales, which are float32 in all of them.
INT8 = [
    replace(SHAPES[3], cache_dtype=torch.int8, spare=32),
    replace(SHAPES[4], cache_dtype=torch.int8, layout="nhd"),
    replace(SHAPES[7], cache_dtype=torch.int8),
    replace(SHAPES[8], cache_dtype=torch.int8, dtype=torch.float16),
]


def label(shape: Shape) -> str:
    method = "fier" if shape.has_codes else "quest"
    heads = f"{shape.heads}of{shape.kv_heads}"
    dtype = str(shape.dtype).removeprefix("torch.")
    if shape.cache_dtype is not None:
        dtype += "-over-" + str(shape.cache_dtype).removeprefix("torch.")
    return f"{method}{shape.group}-{heads}x{shape.head_dim}-{shape.layout}-{dtype}"


def with_each_shape(name: str, values: Sequence[Any]) -> pytest.MarkDecorator:
    """Every shape with every value; under the interpreter, which is slow, with one of them."""
    cases = [
        pytest.param(shape, value, id=f"{label(shape)}-{value}")
        for i, shape in enumerate(SHAPES)
        for j, value in enumerate(values)
        if torch.cuda.is_available() or (i - j) % len(values) == 0
    ]
    return pytest.mark.parametrize(("shape", name), cases)


@dataclass(frozen=True)
class Rows:
    """Rows of a batch on host and device."""

    tokens: list[int]
    requests: list[int]
    lens: list[int]
    budgets: list[int]
    unit: int
    device: str

    @property
    def on_device(self) -> RetrievalRows:
        return RetrievalRows.of(
            *(np.array(x) for x in (self.tokens, self.requests, self.lens, self.budgets)),
            self.unit,
            torch.device(self.device),
        )

    def units(self, row: int) -> int:
        return -(-self.lens[row] // self.unit)

    @property
    def capacity(self) -> int:
        return int(room_of(np.array(self.lens), self.unit).sum())


def rows_of(shape: Shape, device: str) -> Rows:
    """Whole requests, one of them twice, idle rows and lengths around the last group's edge."""
    lens, requests = [], []
    for f, length in enumerate(shape.lengths):
        edge = length // shape.group * shape.group
        mine = {length, edge, edge - 1, 1} if f == 0 else {length, min(edge + 1, length)}
        for each in sorted(n for n in mine if 0 < n <= length):
            lens += [each, 0] if len(lens) == 1 else [each]
            requests += [f, 0] if len(requests) == 1 else [f]
    count = len(lens)
    # Neither in order nor without gaps.
    tokens = [(5 * r + 2) % (count + 2) for r in range(count)]
    if len(set(tokens)) < count:
        tokens = list(range(count + 1, 1, -1))
    units = [-(-n // shape.unit) for n in lens]
    budgets = [max(1, n * share // 8) for n, share in zip(units, [3, 8, 5, 9, 1, 7] * 3)]  # noqa: B905
    return Rows(tokens, requests, lens, budgets, shape.unit, device)


def expected_scores(layer: Layer, query: Tensor, request: int, length: int, how: str) -> Tensor:
    """(G, units) from the keys themselves, by the policy's own functions."""
    shape = layer.shape
    full = num_full_groups(length, shape.group)
    keys = layer.keys(request, full * shape.group)
    if full == 0:
        scores = torch.zeros(shape.heads, 0, device=keys.device)
    elif shape.has_codes:
        scores = token_scores(query, *quantize_keys(keys, shape.group))
    else:
        scores = page_scores(query, *quantize_keys(keys, shape.group)[1:])
    scores = reduce_heads(scores, shape.kv_heads, how, SCALE)
    newest = -(-(length - full * shape.group) // shape.unit)
    return torch.nn.functional.pad(scores, (0, newest), value=float("inf"))


def scored(kind: str, count: int, rng: torch.Generator) -> Tensor:
    """(count,) scores of one kind, each kind a hard case of its own."""
    uniform = torch.rand(count, generator=rng)
    if kind == "normal":
        return torch.randn(count, generator=rng)
    if kind == "plateaus":
        return (uniform * 5).floor() - 2
    if kind == "equal":
        return torch.full((count,), -0.125)
    if kind == "zeros":  # Of both signs: equal.
        return torch.where(uniform < 0.5, 0.0, -0.0)
    if kind == "neighbours":  # Floats that differ in their last two bits.
        bits = torch.tensor(-0.7).view(torch.int32) + (uniform * 4).int()
        return bits.view(torch.float32)
    assert kind == "extremes"
    inf = float("inf")
    extremes = torch.tensor([-inf, -3.4e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1e-38, 3.4e38, inf])
    return extremes[(uniform * len(extremes)).long()]
