"""Retrieval's CUDA and Triton operators against plain torch. Skipped if the first are not built."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_kvx.equations.retrieval import num_full_groups, reduce_heads, token_scores
from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.retrieval import cuda as cuda_ops
from vllm_kvx.ops.retrieval.attend import attend
from vllm_kvx.ops.retrieval.topk import top_units

from .retrieval_cases import (
    BF16,
    E4M3,
    FP16,
    INT8,
    KEY_SCALE,
    LENGTHS,
    POISON,
    VALUE_SCALE,
    Attention,
    Scores,
    check_attention,
    check_scores,
    check_selected,
    make_case,
    outputs,
    rows_of,
    run_attend,
    run_score,
)

pytestmark = pytest.mark.skipif(bool(cuda_ops.why_not()), reason=cuda_ops.why_not())
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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cache_dtype", [BF16, INT8], ids=str)
def test_graph_of_all(overlap: bool, cache_dtype: torch.dtype) -> None:
    """Two layers of a step at full length, captured once and replayed on other lengths.

    overlap: each operator starts before the one before it has ended; on Hopper and later.
    """
    lens, budget, splits = [130_000, 70_001, 400, 0], 1024, 8
    case = make_case(lens, kv_heads=8, seed=5, cache_dtype=cache_dtype)
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
@pytest.mark.parametrize(
    ("reduction", "cache_dtype"),
    [("max", BF16), ("max", INT8), ("sum", BF16), ("softmax", BF16)],
    ids=str,
)
def test_triton(
    head_dim: int, share: int, pages: bool, reduction: str, cache_dtype: torch.dtype
) -> None:
    """A step of the Triton operators, one after the other."""
    budget, splits, unit = 256, 3, 32 if pages else 1
    scale = head_dim**-0.5 / 8
    case = make_case(
        LENGTHS, head_dim=head_dim, share=share, has_codes=not pages, cache_dtype=cache_dtype
    )
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
