"""Retrieval's kernels against their references; under Triton's interpreter on CPU.

Whatever must not be read is NaN or out of range, and so is what is not written yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.nightly import by_day
from support.ragged import NO_BLOCK, make_sinks
from torch import Tensor

from vllm_kvx.equations.retrieval import (
    num_full_groups,
    page_scores,
    quantize_keys,
    reduce_heads,
    select_units,
    token_scores,
)
from vllm_kvx.indexes.base import AnyIndex
from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.attend import attend, attend_reference
from vllm_kvx.ops.retrieval.backends import BACKEND_VARIABLE, Backends, choose_backend
from vllm_kvx.ops.retrieval.index_layout import PageShape, Sidecar, channel_bits
from vllm_kvx.ops.retrieval.retrieve import Scratch, retrieve, splits_of
from vllm_kvx.ops.retrieval.rows import RetrievalRows, offsets_of, pack, room_of
from vllm_kvx.ops.retrieval.topk import top_units, top_units_reference
from vllm_kvx.policy.axes import REDUCTIONS

SCALE = 0.2
ONE_BIT, PAGE_BOUNDS = INDEXES["one_bit"], INDEXES["page_bounds"]
UNWRITTEN = -7


@pytest.fixture(autouse=True)
def bfloat16_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes bfloat16 for the integers that it stores it in, in two places."""
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        wide = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, *wide, *args)

    def cast_impl(self: Any, value: Any, to: Any) -> Any:
        if to.scalar == tl.bfloat16 and value.dtype.scalar.is_int():
            value = cast(self, value, tl.float32)
        return cast(self, value, to)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)


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
        stride = page + shape.index.page_bytes(shape.page) + shape.spare
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
        paged = PagedKV.of(kv_cache, shape.head_dim, cpu_isa=isa)
        order = torch.randperm(num_blocks, generator=rng, device=device).int()
        tables = torch.full((len(counts), max(counts) + 1), NO_BLOCK, device=device).int()
        for f, (length, count) in enumerate(zip(shape.lengths, counts, strict=True)):
            tables[f, :count], order = order[:count], order[count:]
            index = torch.arange(length, device=device)
            block, entry = tables[f, index // size].long(), index % size
            for cache in (paged.keys, paged.values):
                data = torch.randn(length, heads, shape.head_dim, generator=rng, device=device)
                kind = torch.uint8 if dtype.itemsize == 1 else dtype
                cache.view(kind)[block, :, entry] = data.to(dtype).view(kind)
        return cls(shape, raw, paged, shape.index.view(kv_cache, shape.page), tables)

    def keys(self, request: int, length: int) -> Tensor:
        """(G, length, D) float32."""
        raw = self.paged
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


def label(shape: Shape) -> str:
    method = "fier" if shape.has_codes else "quest"
    heads = f"{shape.heads}of{shape.kv_heads}"
    dtype = str(shape.dtype).removeprefix("torch.")
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


class TestSidecar:
    @pytest.mark.parametrize("shape", [*SHAPES, FP8], ids=label)
    def test_writes_full_groups_and_nothing_else(self, shape: Shape, device: str) -> None:
        layer = Layer.of(shape, 0, device)
        expected = Layer.of(shape, 0, device)
        jobs = []
        for f, length in enumerate(shape.lengths):
            # All but the first group of the first request.
            begin, end = min(1, length // shape.group) * (f == 0), length // shape.group
            jobs += [(0, f, group) for group in range(begin, end)]
            shape.index.write_in_torch(
                expected.paged, expected.sidecar, layer.tables[f], begin, end
            )
        writer = shape.index.writer([(layer.paged, layer.sidecar)], [0], [0])
        writer.write(jobs_of(jobs, device), *pointers([layer.tables]))
        assert torch.equal(layer.raw, expected.raw)
        layer.fill()
        for f, length in enumerate(shape.lengths):
            count = length // shape.group
            keys = layer.keys(f, count * shape.group)
            if not count:
                continue
            signs, scales, zeros = quantize_keys(keys, shape.group)
            ours = layer.sidecar.dense(layer.tables[f], count)
            assert (ours[0] is None) == (not shape.has_codes)
            assert ours[0] is None or torch.equal(ours[0], signs)
            assert torch.equal(ours[1], scales) and torch.equal(ours[2], zeros)

    def test_layers_of_other_segments_and_groups(self, device: str) -> None:
        """Each layer by the block table of its KV group, and only jobs of its segment."""
        shape = Shape((96, 70), heads=2, kv_heads=2, head_dim=32, spare=32)
        # By layer: KV group and segment. Two KV groups make up the first segment.
        groups, segments = [0, 1, 2, 0], [0, 0, 1, 0]
        seeds = [3, 4, 5, 3]
        layers = [Layer.of(shape, seed, device) for seed in seeds]
        tables = [layers[i].tables for i in (0, 1, 2)]
        jobs = [(0, 0, 0), (0, 0, 2), (1, 1, 1), (0, 1, 1), (1, 0, 0)]
        writer = shape.index.writer([(x.paged, x.sidecar) for x in layers], groups, segments)

        def expect(index: int) -> Tensor:
            layer = Layer.of(shape, seeds[index], device)
            for segment, request, group in jobs:
                if segment == segments[index]:
                    table = layer.tables[request]
                    shape.index.write_in_torch(layer.paged, layer.sidecar, table, group, group + 1)
            return layer.raw

        untouched = [layer.raw.clone() for layer in layers]
        writer.write(jobs_of([], device), *pointers(tables))
        writer.write(jobs_of(jobs, device), *pointers(tables), layer=2)
        for i, layer in enumerate(layers):
            assert torch.equal(layer.raw, expect(2) if i == 2 else untouched[i])
        writer.write(jobs_of(jobs, device), *pointers(tables))
        for i, layer in enumerate(layers):
            assert torch.equal(layer.raw, expect(i)), i

    def test_extreme_keys(self, device: str) -> None:
        """Equal keys, signed zeros, ranges past float16, and single keys at the edge."""
        shape = Shape((160,), heads=1, kv_heads=1, head_dim=32, dtype=torch.bfloat16)
        layer, expected = (Layer.of(shape, 0, device) for _ in range(2))
        for each in (layer, expected):
            rows = [each.paged.keys[block, 0] for block in each.tables[0, :5].tolist()]
            rows[0][:] = 0.5
            rows[1][:, ::2], rows[1][:, 1::2] = 0.0, -0.0
            rows[2][0], rows[2][1:] = 3e38, -1e38
            rows[3][:] = 1e-6
            rows[4][:-1], rows[4][-1] = 1.0, 1.0078125
        writer = shape.index.writer([(layer.paged, layer.sidecar)], [0], [0])
        writer.write(jobs_of([(0, 0, g) for g in range(5)], device), *pointers([layer.tables]))
        shape.index.write_in_torch(expected.paged, expected.sidecar, expected.tables[0], 0, 5)
        assert torch.equal(layer.raw, expected.raw)
        signs, scales, zeros = layer.sidecar.dense(layer.tables[0], 5)
        assert signs is not None and scales.isfinite().all() and zeros.isfinite().all()
        assert (signs[0, :64] == 1).all(), "keys at the middle of their group are positive"

    def test_every_channel_has_a_bit(self) -> None:
        assert sorted(channel_bits(32).tolist()) == list(range(32))
        assert torch.equal(channel_bits(64), channel_bits(32).repeat(2))

    def test_bytes(self) -> None:
        """An eighth of the keys' bytes at 16 bits, in groups of 32."""
        assert ONE_BIT.page_bytes(PageShape(8, 32, 128, 32)) * 8 == 8 * 32 * 128 * 2
        assert PAGE_BOUNDS.page_bytes(PageShape(8, 32, 128, 16)) == 8 * 2 * 2 * 128 * 2

    def test_layouts_that_cannot_be(self) -> None:
        with pytest.raises(ValueError, match=r"do not divide.*--block-size to a multiple of 64"):
            PageShape(2, 32, 64, 64)
        with pytest.raises(ValueError, match="multiple of 32, this model has 80"):
            ONE_BIT.page_bytes(PageShape(2, 32, 80, 32))
        PAGE_BOUNDS.page_bytes(PageShape(2, 32, 80, 16))

    def test_pages_without_room(self) -> None:
        page = PageShape(2, 32, 32, 32)
        with pytest.raises(ValueError, match=f"no room for {ONE_BIT.page_bytes(page)} more"):
            ONE_BIT.view(torch.zeros(3, 2, 32, 64), page)

    def test_layers_must_be_alike(self) -> None:
        shape = Shape((32,), heads=2, kv_heads=2, head_dim=32)
        layers = [Layer.of(s, 0, "cpu") for s in (shape, replace(shape, spare=32))]
        with pytest.raises(ValueError, match="layers differ"):
            shape.index.writer([(x.paged, x.sidecar) for x in layers], [0, 0], [0, 0])


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


class TestScores:
    @with_each_shape("reduction", REDUCTIONS)
    def test_match_the_policy(self, shape: Shape, reduction: str, device: str) -> None:
        layer = Layer.of(shape, 0, device).fill()
        host = rows_of(shape, device)
        rows, count = host.on_device, len(host.lens)
        query = layer.query(count + 2)
        splits = 1 + SHAPES.index(shape) % 3 * 2
        scores = torch.full((shape.kv_heads, host.capacity + 4), float("nan"), device=device)
        stats = torch.full((count, shape.heads, splits, 2), float("nan"), device=device)
        shape.index.score_in_triton(
            query,
            layer.sidecar,
            layer.tables,
            rows,
            scores,
            stats,
            reduction=reduction,
            scale=SCALE,
            splits=splits,
        )
        written = torch.zeros_like(scores, dtype=torch.bool)
        for r, length in enumerate(host.lens):
            if not length:
                continue
            request, q = host.requests[r], query[host.tokens[r]]
            expected = expected_scores(layer, q, request, length, reduction)
            where = slice(int(rows.offsets[r]), int(rows.offsets[r]) + host.units(r))
            ours = scores[:, where]
            written[:, where] = True
            # Products are sums of D terms; shares of a softmax are at most 1.
            near = dict(rtol=1e-4, atol=1e-6 if reduction == "softmax" else 1e-3)
            torch.testing.assert_close(ours, expected, **near)
            if length > shape.group:
                reference = shape.index.score_in_torch(
                    q, layer.sidecar, layer.tables[request], length, reduction, SCALE
                )
                torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-5)
        assert scores[~written].isnan().all(), "wrote past a row's units"

    @pytest.mark.parametrize("factor", [1e-3, 300.0])
    def test_products_keep_their_digits(self, factor: float, device: str) -> None:
        """Queries of 8 bits and scales of 11, multiplied in float16, of any magnitude."""
        shape = Shape((130,), heads=12, kv_heads=1, head_dim=128, dtype=torch.bfloat16)
        layer = Layer.of(shape, 0, device).fill()
        rows = Rows([0], [0], [130], [64], 1, device).on_device
        query = layer.query(1) * factor
        scores = torch.full((1, 132), float("nan"), device=device)
        stats = torch.empty(0, device=device)
        shape.index.score_in_triton(
            query,
            layer.sidecar,
            layer.tables,
            rows,
            scores,
            stats,
            reduction="max",
            scale=1.0,
            splits=2,
        )
        expected = shape.index.score_in_torch(
            query[0], layer.sidecar, layer.tables[0], 130, "max", 1.0
        )
        off = (scores[:, :128] - expected[:, :128]).abs().max()
        assert off <= 2e-6 * expected[:, :128].abs().max()

    def test_large_scores_do_not_overflow_a_softmax(self, device: str) -> None:
        """Over splits some of which have no group at all."""
        shape = Shape((161,), heads=2, kv_heads=1, head_dim=32)
        layer = Layer.of(shape, 0, device)
        keys = layer.paged.keys
        keys[layer.tables[0, 3].long()] *= 100
        layer.fill()
        rows = Rows([0], [0], [161], [64], 1, device).on_device
        query = layer.query(1) * 30
        scores = torch.full((1, 164), float("nan"), device=device)
        stats = torch.full((1, 2, 9, 2), float("nan"), device=device)
        shape.index.score_in_triton(
            query,
            layer.sidecar,
            layer.tables,
            rows,
            scores,
            stats,
            reduction="softmax",
            scale=1.0,
            splits=9,
        )
        expected = shape.index.score_in_torch(
            query[0], layer.sidecar, layer.tables[0], 161, "softmax", 1.0
        )
        assert expected[:, :160].sum().item() == pytest.approx(2.0, rel=1e-4)
        torch.testing.assert_close(scores[:, :161], expected, rtol=1e-3, atol=1e-6)


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


KINDS = ("normal", "plateaus", "equal", "zeros", "neighbours", "extremes")


class TestTopUnits:
    def select(
        self, host: Rows, scores: Sequence[Sequence[Tensor]], most: int, fused: bool = False
    ) -> tuple[RetrievalRows, Tensor, Tensor]:
        """Runs the kernel; scores by row and head."""
        rows = host.on_device
        flat = torch.full((len(scores[0]), host.capacity + 4), float("nan"))
        for r, heads in enumerate(scores):
            for g, each in enumerate(heads):
                flat[g, int(rows.offsets[r]) : int(rows.offsets[r]) + len(each)] = each
        shape = (len(host.lens), len(scores[0]))
        indices = torch.full((*shape, most), UNWRITTEN, dtype=torch.int32, device=host.device)
        counts = torch.full(shape, UNWRITTEN, dtype=torch.int32, device=host.device)
        # Fused, several programs share a row.
        splits = 3 if fused else None
        top_units(
            *(flat.to(host.device), rows, indices, counts),
            unit=host.unit,
            splits=splits,
            fused=fused,
        )
        return rows, indices.cpu(), counts.cpu()

    @pytest.mark.parametrize(
        ("kind", "unit", "fused"),
        by_day(
            [(kind, *form) for kind in KINDS for form in ((1, False), (16, False), (1, True))],
            range(0, 3 * len(KINDS), 2),
        ),
    )
    def test_matches_reference(self, kind: str, unit: int, fused: bool, device: str) -> None:
        rng = torch.Generator().manual_seed(KINDS.index(kind))
        units = [300, 0, 65, 64, 40, 1, 129, 7]
        budgets = [70, 64, 64, 64, 1, 1, 128, 3]
        lens = [n * unit - (unit > 1) * (r % unit) if n else 0 for r, n in enumerate(units)]
        host = Rows([0] * 8, [0] * 8, lens, budgets, unit, device)
        scores = [[scored(kind, n, rng) for _ in range(2)] for n in units]
        _, indices, counts = self.select(host, scores, 130, fused)
        for r, (heads, budget) in enumerate(zip(scores, budgets, strict=True)):
            for g, each in enumerate(heads):
                count = min(budget, len(each))
                assert counts[r, g] == count
                ours = indices[r, g, :count].long()
                theirs = top_units_reference(each, budget)
                assert torch.equal(ours, theirs), (kind, r, g)
                assert (indices[r, g, count:] == UNWRITTEN).all(), "wrote past the count"

    @pytest.mark.parametrize("fused", [False, True])
    def test_long_rows(self, fused: bool, device: str) -> None:
        """Longer than what one program reads at once, ties on both sides of the seam."""
        rng = torch.Generator().manual_seed(9)
        host = Rows([0, 0, 0], [0, 0, 0], [4097, 8200, 9000], [4096, 300, 9001], 1, device)
        scores = [
            [scored("plateaus", 4097, rng)],
            [scored("extremes", 8200, rng)],
            [torch.full((9000,), float("nan"))],  # Not read: the budget is longer.
        ]
        _, indices, counts = self.select(host, scores, 9001, fused)
        assert counts[:, 0].tolist() == [4096, 300, 9000]
        for r, budget in ((0, 4096), (1, 300)):
            theirs = top_units_reference(scores[r][0], budget)
            assert torch.equal(indices[r, 0, :budget].long(), theirs)
        assert indices[2, 0, :9000].tolist() == list(range(9000))

    def test_every_budget_of_a_plateau(self, device: str) -> None:
        row = torch.tensor([2.0, 1, 3, 2, 2, 1, float("inf"), 0, 2])
        budgets = list(range(1, 11))
        host = Rows([0] * 10, [0] * 10, [9] * 10, budgets, 1, device)
        _, indices, counts = self.select(host, [[row]] * 10, 10)
        assert counts[:, 0].tolist() == [min(n, 9) for n in budgets]
        assert indices[3, 0, :4].tolist() == [0, 2, 3, 6]


class TestAttend:
    @with_each_shape("splits", [8, 1, 3])
    def test_matches_reference(self, shape: Shape, splits: int, device: str) -> None:
        self.check(shape, splits, device)

    def test_fp8(self, device: str) -> None:
        self.check(FP8, 2, device, key_scale=0.5, value_scale=2.0)

    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize(
        ("soft_cap", "sink_dtype"),
        [(None, torch.float32), (0.7, None), (0.7, torch.bfloat16)],
        ids=str,
    )
    def test_soft_caps_and_sinks(
        self, soft_cap: float | None, sink_dtype: torch.dtype | None, splits: int, device: str
    ) -> None:
        shape = SHAPES[0]
        sinks = None if sink_dtype is None else make_sinks(shape.heads, device, sink_dtype)
        self.check(shape, splits, device, key_scale=0.5, soft_cap=soft_cap, sinks=sinks)

    def test_reference_caps_and_sinks_as_written_out(self, device: str) -> None:
        layer = Layer.of(SHAPES[0], 0, device)
        cap, sinks, index = 0.7, make_sinks(2, device), torch.arange(9, device=device)
        one = PagedKV(layer.paged.keys[:, :1], layer.paged.values[:, :1])
        query, table = layer.query(1)[0, :2], layer.tables[0]
        ours = attend_reference(query, one, table, index, SCALE, soft_cap=cap, sinks=sinks)
        blocks, slots = table[index // one.block_size].long(), index % one.block_size
        keys, values = (x[blocks, 0, slots].double() for x in (one.keys, one.values))
        for head in range(2):
            weights = (cap * torch.tanh(keys @ query[head].double() * SCALE / cap)).exp()
            expected = weights @ values / (weights.sum() + sinks[head].double().exp())
            torch.testing.assert_close(ours[head].double(), expected, rtol=1e-4, atol=1e-5)

    def check(
        self,
        shape: Shape,
        splits: int,
        device: str,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        layer, host = Layer.of(shape, 0, device), rows_of(shape, device)
        rows, count = host.on_device, len(host.lens)
        query, share = layer.query(count + 2), shape.heads // shape.kv_heads
        rng = torch.Generator().manual_seed(2)
        most = max(host.units(r) for r in range(count)) + 3
        # What is listed past the count, or at all of an idle row, leads nowhere.
        indices = torch.full((count, shape.kv_heads, most), NO_BLOCK, dtype=torch.int32)
        counts = torch.full((count, shape.kv_heads), 1, dtype=torch.int32)
        for r in range(count):
            for g in range(shape.kv_heads):
                # Heads read different units, and different numbers of them.
                number = max(1, host.units(r) * (g + 2) // 4) if host.lens[r] else 1
                number = min(number, max(host.units(r), 1))
                chosen = torch.randperm(host.units(r), generator=rng)[:number].sort().values
                # The newest unit, which need not be full, is always among them.
                if host.lens[r]:
                    chosen[-1] = host.units(r) - 1
                    indices[r, g, :number] = chosen.int()
                counts[r, g] = number
        indices, counts = indices.to(device), counts.to(device)
        out = torch.full(query.shape, float("nan"), dtype=shape.dtype, device=device)
        parts = (count, shape.heads, splits)
        partial = torch.full((*parts, shape.head_dim), float("nan"), device=device)
        lse = torch.full(parts, float("nan"), device=device)
        attend(
            query,
            layer.paged,
            layer.tables,
            rows,
            indices,
            counts,
            partial,
            lse,
            out,
            unit=shape.unit,
            scale=SCALE,
            key_scale=key_scale,
            value_scale=value_scale,
            splits=splits,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        idle = torch.ones(count + 2, dtype=torch.bool)
        for r, length in enumerate(host.lens):
            if not length:
                continue
            idle[host.tokens[r]] = False
            for g in range(shape.kv_heads):
                units = indices[r, g, : counts[r, g]].long()
                entries = units[:, None] * shape.unit + torch.arange(shape.unit, device=device)
                entries = entries[entries < length]
                heads = slice(g * share, (g + 1) * share)
                one = PagedKV(layer.paged.keys[:, g : g + 1], layer.paged.values[:, g : g + 1])
                expected = attend_reference(
                    query[host.tokens[r], heads],
                    one,
                    layer.tables[host.requests[r]],
                    entries,
                    SCALE,
                    key_scale,
                    value_scale,
                    soft_cap,
                    None if sinks is None else sinks[heads],
                )
                ours = out[host.tokens[r], heads].float()
                exact = shape.dtype == torch.float32
                near = dict(rtol=1e-4, atol=1e-5) if exact else dict(rtol=2e-2, atol=2e-2)
                torch.testing.assert_close(ours, expected, **near)
        assert out[idle].isnan().all(), "wrote rows that do not retrieve"


class TestRetrieve:
    @pytest.mark.parametrize(
        ("shape", "reduction", "soft_cap"),
        [
            (SHAPES[0], "max", None),
            (SHAPES[3], "softmax", None),
            (SHAPES[5], "sum", None),
            (SHAPES[6], "max", 0.7),
            (SHAPES[8], "softmax", None),
        ],
        ids=lambda value: label(value) if isinstance(value, Shape) else value,
    )
    def test_backends_agree(
        self, shape: Shape, reduction: str, soft_cap: float | None, device: str
    ) -> None:
        """The kernels one after the other against plain torch, and both against the policy.

        Whether a model caps its logits or has sinks, the same entries are read.
        """
        sinks = None if soft_cap is None else make_sinks(shape.heads, device)
        layer, host = Layer.of(shape, 0, device).fill(), rows_of(shape, device)
        count = len(host.lens)
        # No budget is less than a group, and only what is longer than the budget gets here.
        newest = shape.group // shape.unit
        host = replace(
            host,
            lens=[n if n > shape.group else 0 for n in host.lens],
            budgets=[max(budget, newest) for budget in host.budgets],
        )
        rows, query = host.on_device, layer.query(count + 2)
        found: list[dict[str, Any]] = []
        for backend in ("triton", "torch"):
            scratch = Scratch.of(
                shape.index,
                num_heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                max_rows=count,
                capacity=host.capacity,
                max_units=max(host.budgets),
                unit=shape.unit,
                reduction=reduction,
                device=torch.device(device),
                backend=backend,
            )
            assert scratch.capacity == host.capacity
            out = torch.full(query.shape, float("nan"), dtype=shape.dtype, device=device)
            retrieve(
                query,
                layer.paged,
                layer.sidecar,
                layer.tables,
                rows,
                scratch,
                out,
                scale=SCALE,
                key_scale=1.0,
                value_scale=1.0,
                soft_cap=soft_cap,
                sinks=sinks,
            )
            found.append({"out": out, "scratch": scratch})
        tolerance = 1e-4 if shape.dtype == torch.float32 else 2e-2
        ours, theirs = (f["out"].float() for f in found)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
        for r, length in enumerate(host.lens):
            for f in found:
                assert (f["scratch"].counts[r] == min(host.units(r), host.budgets[r])).all()
            if not length:
                continue
            request, q = host.requests[r], query[host.tokens[r]]
            scores = expected_scores(layer, q, request, length, reduction).cpu()
            full = num_full_groups(length, shape.group) * (shape.group // shape.unit)
            for g in range(shape.kv_heads):
                budget = host.budgets[r] * shape.unit
                read = select_units(scores[g, :full], length, shape.group, shape.unit, budget)
                for f in found:
                    units = f["scratch"].indices[r, g, : f["scratch"].counts[r, g]].long().cpu()
                    entries = units[:, None] * shape.unit + torch.arange(shape.unit)
                    assert torch.equal(entries[entries < length], read), (r, g)


class TestRows:
    def test_scores_begin_where_vector_loads_may(self) -> None:
        lens = np.array([5, 0, 4, 17, 1])
        assert room_of(lens, 1).tolist() == [8, 0, 4, 20, 4]
        assert offsets_of(lens, 1).tolist() == [0, 8, 8, 12, 32]
        assert room_of(lens, 16).tolist() == [4, 0, 4, 4, 4]
        fields, offsets = pack(np.arange(5), np.arange(5), lens, lens, 1)
        assert fields.dtype == np.int32 and fields.shape == (4, 5)
        assert offsets.dtype == np.int64

    def test_offsets_of_a_large_batch(self) -> None:
        lens = np.full(64, 1 << 27, dtype=np.int64)
        assert offsets_of(lens, 1)[-1] == 63 << 27

    def test_empty_rows_do_nothing(self, device: str) -> None:
        rows = RetrievalRows.empty(4, torch.device(device))
        few = rows.first(2)
        assert not rows.lens.any() and len(few.lens) == len(few.offsets) == 2
        assert few.lens.data_ptr() == rows.lens.data_ptr()
        assert few.offsets.data_ptr() == rows.offsets.data_ptr()


class TestBackend:
    @pytest.mark.parametrize("name", ["triton", "torch"])
    def test_asked_for(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(BACKEND_VARIABLE, name)
        for device in ("cpu", "cuda") if name == "triton" else ("cpu",):
            backend, why = choose_backend(torch.device(device))
            assert backend == name and BACKEND_VARIABLE in why

    def test_what_there_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(BACKEND_VARIABLE, "numpy")
        with pytest.raises(ValueError, match="one of cuda, triton, torch, got 'numpy'"):
            choose_backend(torch.device("cpu"))
        monkeypatch.setenv(BACKEND_VARIABLE, "cuda")
        with pytest.raises(ValueError, match="needs a GPU"):
            choose_backend(torch.device("cpu"))
        monkeypatch.setenv(BACKEND_VARIABLE, "torch")
        with pytest.raises(ValueError, match="is for CPUs"):
            choose_backend(torch.device("cuda"))

    def test_by_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
        assert choose_backend(torch.device("cpu"))[0] == "torch"
        assert choose_backend(torch.device("cuda"))[0] in ("cuda", "triton")

    @pytest.mark.parametrize(
        ("options", "ops", "why"),
        [
            ({}, "cuda", "built"),
            ({"reduction": "sum", "head_dim": 256, "share": 16}, "cuda", "built"),
            ({"reduction": "softmax"}, "score and select: triton, attend: cuda", "max or sum"),
            ({"dtype": torch.float32}, "triton", "not float32"),
            ({"head_dim": 32}, "triton", "64, 128, 256, not 32"),
            ({"share": 17, "reduction": "softmax"}, "triton", "at most 16 query heads"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_triton_where_there_is_no_cuda_op(
        self, options: dict[str, Any], ops: str, why: str
    ) -> None:
        query = {"dtype": torch.bfloat16, "head_dim": 128, "share": 4, "reduction": "max"}
        backends = Backends.of("cuda", "built", **(query | options))
        assert str(backends) == ops and why in backends.reason
        for backend in ("triton", "torch"):
            asked = Backends.of(backend, "set", **(query | options))
            assert str(asked) == backend and asked.reason == "set"

    def test_splits(self) -> None:
        assert splits_of(256, 1, 8) == 32
        assert splits_of(256, 1, 8, most=16) == 16
        assert splits_of(256, 100, 8) == 1
