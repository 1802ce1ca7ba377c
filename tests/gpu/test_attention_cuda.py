"""The CUDA operator of retrieval that attends, against plain torch. Skipped if it is not built."""

import pytest
import torch
from support.ragged import make_sinks

from vllm_kvx.ops.retrieval import cuda as cuda_ops
from vllm_kvx.ops.retrieval.attend import attend
from vllm_kvx.ops.retrieval.rows import RetrievalRows

from .retrieval_cases import (
    BF16,
    E4M3,
    E5M2,
    FP16,
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
