"""The CUDA operator of retrieval that attends, against plain torch. Skipped if it is not built."""

from dataclasses import replace

import pytest
import torch
from support.ragged import make_sinks

from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval import cuda as cuda_ops
from vllm_kvx.ops.retrieval.all_entries import UNIT, AllEntries
from vllm_kvx.ops.retrieval.attend import attend, attend_reference
from vllm_kvx.ops.retrieval.retrieve import Scratch
from vllm_kvx.ops.retrieval.rows import RetrievalRows

from .retrieval_cases import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    INT8,
    KEY_SCALE,
    LENGTHS,
    VALUE_SCALE,
    Attention,
    any_units,
    check_attention,
    make_case,
    run_attend,
)

pytestmark = pytest.mark.skipif(bool(cuda_ops.why_not()), reason=cuda_ops.why_not())

DTYPES = [
    *((BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E5M2)),
    *((BF16, INT8), (FP16, INT8)),
]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("share", [1, 4, 7, 8, 12, 16])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES, ids=str)
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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("share", [2, 16])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES, ids=str)
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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("share", [4, 16])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
def test_int8_of_any_size(head_dim: int, share: int, dtype: torch.dtype, order: str) -> None:
    """Values of very different sizes, and logits that spread more and more, or less."""
    length = 700
    case = make_case([length], head_dim=head_dim, share=share, dtype=dtype, cache_dtype=INT8)
    paged, table = case.paged, case.table(0)
    assert paged.key_scales is not None and paged.value_scales is not None
    position = torch.linspace(0, 1, length, device="cuda")
    if order == "falling":
        position = position.flip(0)
    elif order == "mixed":
        position = position[torch.randperm(length, device="cuda")]
    index = torch.arange(length, device="cuda")
    at = table[index // 32].long(), slice(None), index % 32
    most = 0.01 if dtype == FP16 else 1e4
    paged.value_scales[at] = (most * 2.0 ** (16 * (position - 1)))[:, None]
    paged.key_scales[at] = (0.02 * 16.0**position)[:, None]
    indices = index.int().expand(1, case.num_kv_heads, -1).contiguous()
    counts = torch.full((1, case.num_kv_heads), length, dtype=torch.int32, device="cuda")
    for splits in (1, 3):
        got = Attention.of(case, splits)
        run_attend(case, indices, counts, 1, splits, got)
        for head in range(case.num_kv_heads):
            heads = slice(head * share, (head + 1) * share)
            expected = attend_reference(
                case.query(0)[heads],
                paged.of_head(head),
                table,
                index,
                head_dim**-0.5,
                KEY_SCALE,
                VALUE_SCALE,
            )
            off = (got.out[int(case.tokens[0]), heads].float() - expected).abs()
            near = 8e-3 if dtype == BF16 else 2e-3
            assert (off.amax(dim=1) < near * expected.abs().amax(dim=1)).all()


@pytest.mark.parametrize("cache_dtype", [BF16, E4M3, INT8], ids=str)
@pytest.mark.parametrize(("kv_heads", "splits"), [(2, 1), (2, 16), (1, 16)])
def test_one_list_for_all(cache_dtype: torch.dtype, kv_heads: int, splits: int) -> None:
    """As a list of each row and KV head says, which are alike."""
    case, unit = make_case(LENGTHS, kv_heads=kv_heads, cache_dtype=cache_dtype), 32
    units = torch.arange(-(-max(LENGTHS) // unit), dtype=torch.int32, device="cuda")
    counts = ((case.lens + unit - 1) // unit)[:, None].expand(-1, case.num_kv_heads).contiguous()
    one = units.expand(*counts.shape, -1)
    found = []
    for indices in (one.contiguous(), one):
        got = Attention.of(case, splits)
        run_attend(case, indices, counts, unit, splits, got)
        check_attention(case, indices, counts, unit, got)
        found.append(got.out.nan_to_num(7))
    assert torch.equal(*found)
    if kv_heads == 1:
        return
    # One list for each KV head is neither.
    by_head = one[:1].contiguous().expand_as(one)
    with pytest.raises(RuntimeError, match="one list for all rows"):
        run_attend(case, by_head, counts, unit, splits, Attention.of(case, splits))


@pytest.mark.parametrize("cache_dtype", [BF16, INT8], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 0.5])
def test_all_entries(cache_dtype: torch.dtype, soft_cap: float | None) -> None:
    """As the layers of a server call it, which do not choose; rows are those of the block table."""
    case = make_case(LENGTHS, cache_dtype=cache_dtype)
    (count, kv_heads), (_, heads, dim) = (len(LENGTHS), case.num_kv_heads), case.q.shape
    first = torch.arange(count, dtype=torch.int32, device="cuda")
    table = case.block_table[case.requests.long()]
    case = replace(case, tokens=first, requests=first, block_table=table)
    scratch = Scratch.of(
        INDEXES["one_bit"],
        num_heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        max_rows=count + 1,
        capacity=4,
        max_units=1,
        unit=1,
        reduction="max",
        device=case.q.device,
        backend="cuda",
    )
    every = AllEntries.of(scratch, max(LENGTHS))
    out = torch.full_like(case.q, float("nan"))
    where = (case.q, case.paged, case.block_table, case.lens, out)
    every.attend(*where, scale=KEY_SCALE * dim**-0.5, soft_cap=soft_cap)
    of = every.scratch
    got = Attention(of.partial, of.partial_lse, of.tickets, out.float() * VALUE_SCALE)
    check_attention(case, of.indices, of.counts, UNIT, got, soft_cap)


def test_int8_without_its_scales_is_refused() -> None:
    case = make_case(LENGTHS, head_dim=64, share=2, cache_dtype=INT8)
    indices, counts = any_units(case, 1)
    for paged, why in (
        (PagedKV(case.paged.keys, case.paged.values), "must have scales"),
        (replace(case.paged, values=case.paged.values.clone()), "like keys"),
        (replace(case.paged, value_scales=case.paged.key_scales), "behind their keys"),
    ):
        with pytest.raises(RuntimeError, match=why):
            run_attend(replace(case, paged=paged), indices, counts, 1, 1, Attention.of(case, 1))


def test_sinks_of_another_type_are_refused() -> None:
    case = make_case(LENGTHS, head_dim=64, share=2, dtype=BF16)
    indices, counts = any_units(case, 1)
    heads = case.q.shape[1]
    for wrong in (make_sinks(heads, "cuda", FP16), make_sinks(heads + 1, "cuda")):
        with pytest.raises(RuntimeError, match="sinks"):
            run_attend(case, indices, counts, 1, 1, Attention.of(case, 1), sinks=wrong)
