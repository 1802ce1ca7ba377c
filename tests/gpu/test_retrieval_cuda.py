"""Retrieval's CUDA and Triton operators against plain torch. Skipped if the first are not built."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.ragged import NO_BLOCK, make_sinks
from torch import Tensor

from vllm_kvx.equations.retrieval import num_full_groups, page_scores, reduce_heads, token_scores
from vllm_kvx.equations.softmax import capped, softmax
from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval import cuda as cuda_ops
from vllm_kvx.ops.retrieval.attend import attend
from vllm_kvx.ops.retrieval.index_layout import PageShape, Sidecar
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.ops.retrieval.topk import top_units

pytestmark = pytest.mark.skipif(bool(cuda_ops.why_not()), reason=cuda_ops.why_not())

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POISON = -7


@dataclass(frozen=True)
class Case:
    """R rows over a cache in which whatever must not be read is NaN."""

    q: Tensor
    paged: PagedKV
    sidecar: Sidecar
    block_table: Tensor
    tokens: Tensor
    requests: Tensor
    lens: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.block_table, self.tokens, self.requests, self.lens

    @property
    def num_kv_heads(self) -> int:
        return self.paged.num_heads

    def table(self, row: int) -> Tensor:
        return self.block_table[int(self.requests[row])]

    def query(self, row: int) -> Tensor:
        return self.q[int(self.tokens[row])]


def make_case(
    lens: Sequence[int],
    *,
    kv_heads: int = 2,
    share: int = 4,
    head_dim: int = 128,
    group: int = 32,
    block_size: int = 32,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    has_codes: bool = True,
    nhd: bool = False,
    q_scale: float = 1.0,
    seed: int = 0,
) -> Case:
    torch.manual_seed(seed)
    random.seed(seed)
    cache_dtype = cache_dtype or dtype
    blocks = [-(-n // block_size) for n in lens]
    total, rows = sum(blocks) + 3, len(lens)
    kept = INDEXES["one_bit" if has_codes else "page_bounds"]
    layout = PageShape(kv_heads, block_size, head_dim, group)
    page = kv_heads * block_size * 2 * head_dim
    itemsize = cache_dtype.itemsize
    stride = page + kept.page_bytes(layout) // itemsize
    memory = torch.full((total, stride * itemsize), 255, dtype=torch.uint8, device="cuda")
    strides = (block_size * 2 * head_dim, 2 * head_dim)
    head_stride, slot_stride = (2 * head_dim, kv_heads * 2 * head_dim) if nhd else strides
    cache = memory.view(cache_dtype).as_strided(
        (total, kv_heads, block_size, 2 * head_dim), (stride, head_stride, slot_stride, 1)
    )
    paged, sidecar = PagedKV.of(cache, head_dim), kept.view(cache, layout)

    order = torch.randperm(total).tolist()
    table = torch.full((rows + 1, max([*blocks, 1]) + 2), NO_BLOCK, dtype=torch.int32)
    requests = torch.randperm(rows + 1)[:rows].int()
    for row, (length, count) in enumerate(zip(lens, blocks, strict=True)):
        mine = [order.pop() for _ in range(count)]
        table[requests[row], :count] = torch.tensor(mine, dtype=torch.int32)
        if not length:
            continue
        entry, at = torch.arange(length), torch.tensor(mine)
        block, slot = at[entry // block_size].cuda(), (entry % block_size).cuda()
        data = torch.randn(length, kv_heads, 2 * head_dim, device="cuda").to(cache_dtype)
        cache.view(torch.uint8)[block, :, slot] = data.view(torch.uint8)
        index = torch.arange(num_full_groups(length, group))
        per_block = block_size // group
        block, at_group = at[index // per_block].cuda(), (index % per_block).cuda()
        scales = torch.randn(len(index), kv_heads, 2, head_dim, device="cuda")
        scales[:, :, 0].abs_()
        sidecar.scales[block, :, at_group] = scales.half()
        if has_codes:
            entry = torch.arange(len(index) * group)
            block, slot = at[entry // block_size].cuda(), (entry % block_size).cuda()
            shape = (len(entry), kv_heads, head_dim // 32)
            words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device="cuda")
            sidecar.codes[block, :, slot] = words.int()
    q = torch.randn(rows + 2, kv_heads * share, head_dim, device="cuda") * q_scale
    return Case(
        q.to(dtype),
        paged,
        sidecar,
        table.cuda(),
        torch.randperm(rows + 2)[:rows].int().cuda(),
        requests.cuda(),
        torch.tensor(lens, dtype=torch.int32, device="cuda"),
    )


@dataclass(frozen=True)
class Scores:
    """Poisoned outputs of the score operators, with room around each row's."""

    units: list[int]
    offsets: Tensor
    values: Tensor
    histogram: Tensor

    @classmethod
    def of(cls, units: list[int], kv_heads: int) -> "Scores":
        starts = torch.tensor([0, *units]).cumsum(0)[:-1] + 3
        values = torch.full((kv_heads, sum(units) + 5), float("nan"), device="cuda")
        histogram = torch.zeros(len(units), kv_heads, 2048, dtype=torch.int32, device="cuda")
        return cls(units, starts.cuda(), values, histogram)

    def row(self, row: int) -> Tensor:
        start = int(self.offsets[row])
        return self.values[:, start : start + self.units[row]]

    def count(self) -> None:
        """Fills the histogram as the score operators do."""
        for row in range(len(self.units)):
            for head, scores in enumerate(self.row(row)):
                self.histogram[row, head] = bins_of(scores)


def bins_of(scores: Tensor) -> Tensor:
    bits = (scores + 0.0).view(torch.int32).long() & 0xFFFFFFFF
    keys = torch.where(bits >= 2**31, 0xFFFFFFFF - bits, bits + 2**31)
    return torch.bincount(keys >> 21, minlength=2048).int()


TOLERANCE = 2e-5


def check_scores(
    case: Case, scores: Scores, reduction: str, pages: bool, tolerance: float = TOLERANCE
) -> None:
    group = case.sidecar.shape.group
    written = torch.zeros_like(scores.values, dtype=torch.bool)
    for row, length in enumerate(case.lens.tolist()):
        got, start = scores.row(row), int(scores.offsets[row])
        written[:, start : start + got.shape[1]] = True
        if not length:
            assert not scores.histogram[row].any()
            continue
        full = num_full_groups(length, group)
        signs, scales, zeros = case.sidecar.dense(case.table(row), full)
        query = case.query(row)
        if pages:
            expected = page_scores(query, scales, zeros)
        else:
            assert signs is not None
            expected = token_scores(query, signs, scales, zeros)
        expected = reduce_heads(expected, case.num_kv_heads, reduction, 1.0)
        known = expected.shape[1]
        if known:
            assert (got[:, :known] - expected).abs().max() <= tolerance * expected.abs().max()
        assert (got[:, known:] == float("inf")).all()
        for head in range(case.num_kv_heads):
            assert torch.equal(scores.histogram[row, head], bins_of(got[head]))
    assert scores.values[~written].isnan().all()


SHAPES: list[dict[str, Any]] = [
    dict(share=4),
    dict(share=1, dtype=FP16, block_size=64),
    dict(share=3, block_size=96),
    dict(share=5, nhd=True),
    dict(share=8, group=64, block_size=64),
    dict(share=7, group=128, block_size=256, dtype=FP16),
    dict(share=6, group=256, block_size=256),
    dict(share=16, kv_heads=1),
    dict(share=8, block_size=544, nhd=True),  # Qwen3-Next's
    dict(share=12, group=64, block_size=192, q_scale=300.0),
    dict(share=4, q_scale=1e-3, cache_dtype=E4M3),
]
LENGTHS = [1000, 0, 33, 32, 1, 129, 4099]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("reduction", "programs"), [("max", 264), ("sum", 5)])
def test_score(head_dim: int, shape: dict[str, Any], reduction: str, programs: int) -> None:
    case = make_case(LENGTHS, head_dim=head_dim, **shape)
    scores = Scores.of(LENGTHS, case.num_kv_heads)
    run_score(case, scores, reduction, programs)
    check_scores(case, scores, reduction, pages=False)


@pytest.mark.parametrize("programs", [1, 33, 264, 4096])
@pytest.mark.parametrize(
    "lengths",
    [
        [70_000],
        [0] * 5,
        [40_000, 0, 0, 3, 0],
        [0] * 40 + [9000],
        [100 * i % 3300 for i in range(1, 75)],
    ],
    ids=["one", "none", "padded", "last", "many"],
)
def test_ctas_that_score_cover_all_rows(lengths: list[int], programs: int) -> None:
    case = make_case(lengths)
    scores = Scores.of(lengths, case.num_kv_heads)
    run_score(case, scores, "max", programs)
    check_scores(case, scores, "max", pages=False)


def test_one_long_row_in_blocks_of_17_groups() -> None:
    """Qwen3-Next's layer: its blocks have 544 tokens."""
    case = make_case([70_000], share=8, head_dim=256, block_size=544, nhd=True)
    scores = Scores.of([70_000], case.num_kv_heads)
    run_score(case, scores, "max", 264)
    check_scores(case, scores, "max", pages=False)


@pytest.mark.parametrize("factor", [0.0, 2.0**-9, 2.0**-5, 100.0, 3000.0])
def test_scales_of_any_size(factor: float) -> None:
    case = make_case(LENGTHS, group=64, block_size=64)
    # Whatever must not be read stays NaN.
    case.sidecar.scales.copy_((case.sidecar.scales.float() * factor).clamp(-65504, 65504).half())
    scores = Scores.of(LENGTHS, case.num_kv_heads)
    run_score(case, scores, "max", 2)
    check_scores(case, scores, "max", pages=False, tolerance=2e-4)


def run_score(case: Case, scores: Scores, reduction: str, programs: int) -> None:
    cuda_ops.score(
        case.q,
        case.sidecar.codes,
        case.sidecar.scales,
        *case.rows,
        scores.offsets,
        scores.values,
        scores.histogram,
        case.sidecar.shape.group,
        cuda_ops.REDUCTIONS[reduction],
        programs,
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("share", "page", "block_size"), [(4, 16, 16), (1, 16, 48), (12, 32, 64), (8, 64, 64)]
)
@pytest.mark.parametrize(("reduction", "splits"), [("max", 3), ("sum", 1)])
def test_score_pages(
    head_dim: int, share: int, page: int, block_size: int, reduction: str, splits: int
) -> None:
    case = make_case(
        LENGTHS,
        head_dim=head_dim,
        share=share,
        group=page,
        block_size=block_size,
        has_codes=False,
        dtype=FP16 if share == 1 else BF16,
    )
    scores = Scores.of([-(-n // page) for n in LENGTHS], case.num_kv_heads)
    cuda_ops.score_pages(
        case.q,
        case.sidecar.scales,
        *case.rows,
        scores.offsets,
        scores.values,
        scores.histogram,
        page,
        cuda_ops.REDUCTIONS[reduction],
        splits,
    )
    check_scores(case, scores, reduction, pages=True)


def some_of(*values: float) -> Callable[[tuple[int, int]], Tensor]:
    def choose(shape: tuple[int, int]) -> Tensor:
        index = torch.randint(0, len(values), shape, device="cuda")
        return torch.tensor(values, device="cuda")[index]

    return choose


DISTRIBUTIONS = {
    "normal": lambda shape: torch.randn(shape, device="cuda") * 10,
    "equal": lambda shape: torch.full(shape, 3.25, device="cuda"),
    "few": lambda shape: torch.randint(-2, 3, shape, device="cuda").float(),
    "close": lambda shape: 1 + torch.rand(shape, device="cuda") * 1e-4,
    "lowest": lambda shape: torch.full(shape, -float("inf"), device="cuda"),
    "special": some_of(0.0, -0.0, 1.0, float("inf"), -float("inf")),
    "denormal": some_of(0.0, *[-1e-40, -1e-45] * 50),
    "few denormal": some_of(0.0, -1e-40, -1e-45, *[-1.0] * 200),
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(
    ("lens", "kv_heads", "unit"),
    [
        ([130_000], 8, 1),  # clusters of 8
        ([0, 5000, 64, 63, 65], 2, 1),  # of 4
        ([300_000], 1, 16),
        ([3000, 2000, 700, 65, 1, 0], 7, 1),  # of 2
        ([70_000, 2000, 700, 65, 1, 0] * 2, 8, 1),  # of 2
        ([40_000, 17, 9000] * 17, 3, 1),  # no cluster, more than shared memory holds
        ([130_000, 70_000], 8, 1),  # of 4, likewise
        ([1_000_000], 1, 1),
    ],
)
@pytest.mark.parametrize("budget", [64, 1024, 4096])
def test_select(distribution: str, lens: list[int], kv_heads: int, unit: int, budget: int) -> None:
    torch.manual_seed(budget)
    units = [-(-n // unit) for n in lens]
    scores = Scores.of(units, kv_heads)
    scores.values.copy_(DISTRIBUTIONS[distribution](tuple(scores.values.shape)))
    for row, count in enumerate(units):
        scores.row(row)[:, max(count - 1, 0) // 32 * 32 :] = float("inf")
    budgets = [budget if row % 2 == 0 else budget // 2 for row in range(len(lens))]
    rows = rows_of(torch.tensor(lens, dtype=torch.int32, device="cuda"), budgets, scores)
    of_rows = (rows.lens, rows.budgets, rows.offsets)
    for ctas in (0, 1, 2, 4, 8):
        indices, counts = outputs(len(lens), kv_heads, budget)
        arguments = (*of_rows, indices, counts, unit, False, ctas)
        scores.count()
        cuda_ops.select(scores.values, scores.histogram, *arguments)
        check_selected(scores, budgets, indices, counts)

    for fused in (False, True):
        indices, counts = outputs(len(lens), kv_heads, budget)
        top_units(scores.values, rows, indices, counts, unit=unit, fused=fused)
        check_selected(scores, budgets, indices, counts)


def rows_of(
    lens: Tensor, budgets: list[int], scores: Scores, case: Case | None = None
) -> RetrievalRows:
    unused = torch.zeros_like(lens)
    tokens, requests = (case.tokens, case.requests) if case else (unused, unused)
    at_most = torch.tensor(budgets, dtype=torch.int32, device="cuda")
    return RetrievalRows(tokens, requests, lens, at_most, scores.offsets)


def outputs(rows: int, kv_heads: int, units: int) -> tuple[Tensor, Tensor]:
    indices = torch.full((rows, kv_heads, units), POISON, dtype=torch.int32, device="cuda")
    return indices, indices[..., 0].clone()


def check_selected(scores: Scores, budgets: list[int], indices: Tensor, counts: Tensor) -> None:
    assert not scores.histogram.any()
    for row, (units, budget) in enumerate(zip(scores.units, budgets, strict=True)):
        count = min(units, budget)
        assert (counts[row] == count).all()
        best = (scores.row(row) + 0.0).sort(dim=1, descending=True, stable=True).indices
        expected = best[:, :count].sort(dim=1).values
        assert torch.equal(indices[row, :, :count].long(), expected)
        assert (indices[row, :, count:] == POISON).all()


@dataclass(frozen=True)
class Attention:
    """Outputs and scratch of ``attend``, poisoned but for the tickets."""

    partial_out: Tensor
    partial_lse: Tensor
    tickets: Tensor
    out: Tensor

    @classmethod
    def of(cls, case: Case, splits: int) -> "Attention":
        rows, (_, heads, dim) = len(case.lens), case.q.shape
        partial = torch.full((rows, heads, splits, dim), float("nan"), device="cuda")
        tickets = torch.zeros(rows, case.num_kv_heads, dtype=torch.int32, device="cuda")
        out = torch.full_like(case.q, float("nan"))
        return cls(partial, partial[..., 0].clone(), tickets, out)


KEY_SCALE, VALUE_SCALE = 0.7, 1.3


def run_attend(
    case: Case,
    indices: Tensor,
    counts: Tensor,
    unit: int,
    splits: int,
    to: Attention,
    overlap: bool = False,
    programs: int = 1 << 20,
    **logits: Any,
) -> None:
    cuda_ops.attend(
        case.q,
        case.paged.keys,
        case.paged.values,
        *case.rows,
        indices,
        counts,
        to.partial_out,
        to.partial_lse,
        to.tickets,
        to.out,
        case.q.shape[2] ** -0.5,
        KEY_SCALE,
        VALUE_SCALE,
        unit,
        splits,
        programs,
        overlap,
        **logits,
    )


def check_attention(
    case: Case,
    indices: Tensor,
    counts: Tensor,
    unit: int,
    got: Attention,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    share, size = case.q.shape[1] // case.num_kv_heads, case.paged.block_size
    assert not got.tickets.any()
    untouched = torch.ones(case.q.shape[0], dtype=torch.bool, device="cuda")
    for row, length in enumerate(case.lens.tolist()):
        if not length:
            continue
        untouched[int(case.tokens[row])] = False
        out = got.out[int(case.tokens[row])].unflatten(0, (-1, share)).float()
        query = case.query(row).unflatten(0, (-1, share)).float()
        for head in range(case.num_kv_heads):
            units = indices[row, head, : int(counts[row, head])].long()
            entry = (units[:, None] * unit + torch.arange(unit, device="cuda")).flatten()
            entry = entry[entry < length]
            block = case.table(row)[entry // size].long()
            keys = case.paged.keys[block, head, entry % size].float() * KEY_SCALE
            values = case.paged.values[block, head, entry % size].float() * VALUE_SCALE
            products = query[head] @ keys.T * case.q.shape[2] ** -0.5
            mine = None if sinks is None else sinks[head * share : (head + 1) * share]
            expected = softmax(capped(products, soft_cap), mine) @ values
            worst = 2e-2 if case.q.dtype == BF16 else 3e-3
            assert (out[head] - expected).abs().max() < worst
    assert got.out[untouched].isnan().all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("share", [1, 4, 7, 8, 12, 16])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E5M2)], ids=str
)
@pytest.mark.parametrize(
    ("unit", "splits", "block_size"),
    [(1, 1, 32), (1, 16, 64), (1, 16, 544), (16, 3, 48), (64, 128, 64)],
)
def test_attend(
    head_dim: int,
    share: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    unit: int,
    splits: int,
    block_size: int,
) -> None:
    case = make_case(
        LENGTHS,
        head_dim=head_dim,
        share=share,
        group=unit if unit > 1 else 32,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        nhd=share % 2 == 1,
    )
    indices, counts = any_units(case, unit)
    got = Attention.of(case, splits)
    run_attend(case, indices, counts, unit, splits, got)
    check_attention(case, indices, counts, unit, got)
    first = got.out.clone()
    run_attend(case, indices, counts, unit, splits, got)
    assert torch.equal(first.nan_to_num(7), got.out.nan_to_num(7)), "not deterministic"


def any_units(case: Case, unit: int) -> tuple[Tensor, Tensor]:
    """Indices and counts of units chosen at random, the newest one among them."""
    most = 1500 // unit
    indices, counts = outputs(len(LENGTHS), case.num_kv_heads, most)
    for row, length in enumerate(LENGTHS):
        units = -(-length // unit)
        for head in range(case.num_kv_heads):
            count = min(random.randint(1, most), units)
            chosen = torch.randperm(max(units - 1, 0))[: max(count - 1, 0)].sort().values
            chosen = torch.cat([chosen, torch.arange(units)[-1:]])
            indices[row, head, : len(chosen)] = chosen.int().cuda()
            counts[row, head] = len(chosen)
    return indices, counts


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("share", [2, 16])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E5M2)], ids=str
)
@pytest.mark.parametrize("splits", [1, 128])
@pytest.mark.parametrize(
    ("soft_cap", "has_sinks"), [(None, True), (0.5, False), (0.5, True), (50.0, True)]
)
def test_soft_caps_and_sinks(
    head_dim: int,
    share: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    splits: int,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    """By the CUDA and the Triton operator; sinks as wide as queries, and in float32."""
    case = make_case(LENGTHS, head_dim=head_dim, share=share, dtype=dtype, cache_dtype=cache_dtype)
    indices, counts = any_units(case, 1)
    heads = case.q.shape[1]
    for sink_dtype in (dtype, torch.float32) if has_sinks else (None,):
        sinks = None if sink_dtype is None else make_sinks(heads, "cuda", sink_dtype)
        logits = {"soft_cap": soft_cap, "sinks": sinks}
        got = Attention.of(case, splits)
        run_attend(case, indices, counts, 1, splits, got, **logits)
        check_attention(case, indices, counts, 1, got, **logits)
    got = Attention.of(case, splits)
    columns = RetrievalRows(case.tokens, case.requests, case.lens, case.lens, case.lens.long())
    parts = (got.partial_out, got.partial_lse, got.out)
    attend(
        case.q,
        case.paged,
        case.block_table,
        columns,
        indices,
        counts,
        *parts,
        unit=1,
        scale=head_dim**-0.5,
        key_scale=KEY_SCALE,
        value_scale=VALUE_SCALE,
        splits=splits,
        **logits,
    )
    check_attention(case, indices, counts, 1, got, **logits)


def test_sinks_of_another_type_are_refused() -> None:
    case = make_case(LENGTHS, head_dim=64, share=2, dtype=BF16)
    indices, counts = any_units(case, 1)
    heads = case.q.shape[1]
    for wrong in (make_sinks(heads, "cuda", FP16), make_sinks(heads + 1, "cuda")):
        with pytest.raises(RuntimeError, match="sinks"):
            run_attend(case, indices, counts, 1, 1, Attention.of(case, 1), sinks=wrong)


@pytest.mark.parametrize("overlap", [False, True])
def test_graph_of_all(overlap: bool) -> None:
    """Two layers of a step at full length, captured once and replayed on other lengths.

    overlap: each operator starts before the one before it has ended; on Hopper and later.
    """
    lens, budget, splits = [130_000, 70_001, 400, 0], 1024, 8
    case = make_case(lens, kv_heads=8, seed=5)
    scores = Scores.of(lens, 8)
    indices, counts = outputs(len(lens), 8, budget)
    budgets = torch.full((len(lens),), budget, dtype=torch.int32, device="cuda")
    got = Attention.of(case, splits)

    def step() -> None:
        run_score(case, scores, "max", 16)
        arguments = (case.lens, budgets, scores.offsets, indices, counts, 1, overlap)
        cuda_ops.select(scores.values, scores.histogram, *arguments)
        run_attend(case, indices, counts, 1, splits, got, overlap, programs=96)

    # Nothing may be lost on the first launch, which raises limits of the kernels.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        step()
    for shorter in (0, 1, 95, 399, 400):
        now = [max(n - shorter, 0) for n in lens]
        case.lens.copy_(torch.tensor(now, dtype=torch.int32))
        for poisoned in (indices, counts):
            poisoned.fill_(POISON)
        got.out.fill_(float("nan"))
        graph.replay()
        live = Scores(now, scores.offsets, scores.values, scores.histogram)
        check_selected(live, [budget] * len(lens), indices, counts)
        check_attention(case, indices, counts, 1, got)
        for row, length in enumerate(now):
            if not length:
                continue
            full = num_full_groups(length, 32)
            signs, scales, zeros = case.sidecar.dense(case.table(row), full)
            assert signs is not None
            expected = token_scores(case.query(row), signs, scales, zeros)
            expected = reduce_heads(expected, 8, "max", 1.0)
            error = (live.row(row)[:, : full * 32] - expected).abs().max() if full else 0
            assert error <= 2e-5 * 1000


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("share", [1, 4, 7])
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("reduction", ["max", "sum", "softmax"])
def test_triton(head_dim: int, share: int, pages: bool, reduction: str) -> None:
    """A step of the Triton operators, one after the other."""
    budget, splits, unit = 256, 3, 32 if pages else 1
    scale = head_dim**-0.5 / 8
    case = make_case(LENGTHS, head_dim=head_dim, share=share, has_codes=not pages)
    heads, kv_heads, rows = case.q.shape[1], case.num_kv_heads, len(LENGTHS)
    scores = Scores.of([-(-n // unit) for n in LENGTHS], kv_heads)
    budgets = [budget // unit - row for row in range(rows)]
    columns = rows_of(case.lens, budgets, scores, case)
    stats = torch.full((rows * heads * splits * 2,), float("nan"), device="cuda")
    what = (case.sidecar, case.block_table, columns)
    INDEXES["page_bounds" if pages else "one_bit"].score_in_triton(
        case.q, *what, scores.values, stats, reduction=reduction, scale=scale, splits=splits
    )
    for row, length in enumerate(LENGTHS):
        if length and reduction == "softmax":
            known = num_full_groups(length, 32) * 32 // unit
            mass = scores.row(row)[:, :known].sum(dim=1)
            assert not known or torch.allclose(mass, torch.full_like(mass, share), rtol=1e-3)
    if reduction != "softmax":
        scores.count()
        check_scores(case, scores, reduction, pages, tolerance=1e-4)
    scores.histogram.zero_()

    indices, counts = outputs(rows, kv_heads, budget // unit)
    top_units(scores.values, columns, indices, counts, unit=unit)
    check_selected(scores, budgets, indices, counts)
    got = Attention.of(case, splits)
    attend(
        case.q,
        case.paged,
        case.block_table,
        columns,
        indices,
        counts,
        got.partial_out,
        got.partial_lse,
        got.out,
        unit=unit,
        scale=head_dim**-0.5,
        key_scale=KEY_SCALE,
        value_scale=VALUE_SCALE,
        splits=splits,
    )
    check_attention(case, indices, counts, unit, got)
