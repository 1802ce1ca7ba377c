"""Scores of the units that a decode step may read, from scales, zeros and codes alone."""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.equations.retrieval import reduce_heads
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.ops.retrieval.sidecar import Sidecar

# Programs of one warp each: a program waits for its loads, so an SM needs many of them.
SCORE_PROGRAMS = 4096
# Tokens of a group that a program scores at a time, at most.
MAX_STEP: tl.constexpr = tl.constexpr(128)


def score_units(
    query: Tensor,
    sidecar: Sidecar,
    block_table: Tensor,
    rows: RetrievalRows,
    scores: Tensor,
    stats: Tensor,
    *,
    reduction: str,
    scale: float,
    splits: int,
    has_codes: bool,
) -> None:
    """Writes one score per KV head and unit: see ``equations.retrieval``.

    Units of the newest group get infinity, since they are always read.

    Args:
        query: (N, H, D). block_table: (B, max_blocks) int32.
        scores: (G, capacity) float32, written at each row's offset.
        stats: (R, H, splits, 2) float32, scratch of the softmax reduction.
        scale: of the softmax reduction. splits: programs that share a row.
        has_codes: units are tokens, scored by their 1-bit codes; otherwise they are groups, scored
            by the bounds that scales and zeros give.
    """
    shape = sidecar.shape
    heads = query.shape[1]
    share = heads // shape.num_kv_heads
    padded = triton.next_power_of_2(share)
    exact = query.dtype == torch.float32
    grid = (splits, shape.num_kv_heads, rows.lens.shape[0])
    args = (
        query,
        sidecar.codes,
        sidecar.scales,
        block_table,
        rows.tokens,
        rows.requests,
        rows.lens,
        rows.offsets,
        scores,
        stats,
        scale,
        query.stride(0),
        query.stride(1),
        sidecar.codes.stride(0),
        sidecar.codes.stride(1),
        sidecar.scales.stride(0),
        sidecar.scales.stride(1),
        block_table.stride(0),
        scores.stride(0),
        splits,
    )
    constants = dict(
        BLOCK_SIZE=shape.block_size,
        GROUP=shape.group,
        D=shape.head_dim,
        SHARE=share,
        PADDED=padded,
        # Matrix instructions want 16 columns; a product is the sum of two bfloat16 ones.
        COLUMNS=max(16, padded * (1 if exact else 2)),
        HAS_CODES=has_codes,
        EXACT=exact,
        num_warps=1,
    )
    kernel = _score_kernel[grid]
    if reduction != "softmax":
        kernel(*args, REDUCTION=reduction, **constants)
        return
    kernel(*args, REDUCTION="stats", **constants)
    _merge_stats_kernel[(heads, rows.lens.shape[0])](
        rows.lens, stats, splits, BLOCK=triton.next_power_of_2(splits)
    )
    kernel(*args, REDUCTION="softmax", **constants)


@triton.jit
def _score_kernel(
    query,
    codes,
    scales,
    block_table,
    row_tokens,
    row_requests,
    row_lens,
    row_offsets,
    scores,
    stats,
    scale,
    query_stride,
    query_head_stride,
    code_block_stride,
    code_head_stride,
    scale_block_stride,
    scale_head_stride,
    table_stride,
    score_stride,
    splits,
    REDUCTION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SHARE: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_CODES: tl.constexpr,
    EXACT: tl.constexpr,
):
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(row_lens + row)
    if length == 0:
        return
    num_groups = (length - 1) // GROUP
    # Tokens that are scored at a time: more of them would not fit into registers.
    STEP: tl.constexpr = GROUP if GROUP < MAX_STEP or not HAS_CODES else MAX_STEP
    steps = num_groups * (GROUP // STEP)
    per_split = tl.cdiv(steps, splits)
    begin = split * per_split
    end = tl.minimum(begin + per_split, steps)
    UNITS: tl.constexpr = STEP if HAS_CODES else 1
    unit = tl.arange(0, UNITS)
    out = scores + head.to(tl.int64) * score_stride + tl.load(row_offsets + row)
    if REDUCTION != "stats" and split == 0:
        last = length if HAS_CODES else num_groups + 1
        for later in range(GROUP // STEP):
            newest = (steps + later) * UNITS + unit
            tl.store(out + newest, float("inf"), mask=newest < last)

    channel = tl.arange(0, D)
    column = tl.arange(0, COLUMNS)
    part = column // PADDED
    token = tl.load(row_tokens + row).to(tl.int64)
    table = block_table + tl.load(row_requests + row).to(tl.int64) * table_stride
    first_head = query + token * query_stride + head * SHARE * query_head_stride
    at = (column % PADDED)[None, :] * query_head_stride + channel[:, None]
    is_head = (column % PADDED)[None, :] < SHARE
    wide = tl.load(first_head + at, mask=is_head, other=0.0).to(tl.float32)
    one = tl.arange(0, PADDED)
    at = one[None, :] * query_head_stride + channel[:, None]
    narrow = tl.load(first_head + at, mask=one[None, :] < SHARE, other=0.0).to(tl.float32)

    stat = stats + ((row * tl.num_programs(1) + head) * SHARE + one).to(tl.int64) * splits * 2
    peak = tl.full((PADDED,), float("-inf"), tl.float32)
    mass = tl.zeros((PADDED,), tl.float32)
    if REDUCTION == "softmax":
        peak = tl.load(stat, mask=one < SHARE, other=0.0)
        mass = tl.load(stat + 1, mask=one < SHARE, other=1.0)

    for index in range(begin, end):
        block = tl.load(table + index * STEP // BLOCK_SIZE).to(tl.int64)
        slot = index * STEP % BLOCK_SIZE
        pair = scales + block * scale_block_stride + head * scale_head_stride
        pair += slot // GROUP * (2 * D)
        step = tl.load(pair + channel).to(tl.float32)
        zero = tl.load(pair + D + channel).to(tl.float32)
        bias = tl.sum(narrow * zero[:, None], axis=0)
        if HAS_CODES:
            WORDS: tl.constexpr = D // 32
            word = codes + block * code_block_stride + head * code_head_stride + slot * WORDS
            word = tl.load(word + unit[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
            lane = tl.arange(0, 32)
            shift = 15 - lane // 2 + 16 * (lane % 2)
            sign = ((word[:, :, None] >> shift[None, None, :]) & 1) * 2 - 1
            sign = tl.reshape(sign, (UNITS, D))
            factor = wide * step[:, None]
            if EXACT:
                factor = tl.where(part[None, :] == 0, factor, 0.0)
                product = tl.dot(sign.to(tl.float32), factor, input_precision="ieee")
            else:
                high = factor.to(tl.bfloat16)
                low = (factor - high.to(tl.float32)).to(tl.bfloat16)
                factor = tl.where(part[None, :] == 0, high, low)
                factor = tl.where(part[None, :] < 2, factor, 0.0).to(tl.bfloat16)
                product = tl.dot(sign.to(tl.bfloat16), factor)
            product = tl.reshape(product, (UNITS, COLUMNS // PADDED, PADDED))
            product = tl.sum(product, axis=1) + bias[None, :]
        else:
            bound = bias + tl.sum(tl.abs(narrow) * step[:, None], axis=0)
            product = tl.reshape(bound, (1, PADDED))
        if REDUCTION == "stats":
            product = product * scale
            higher = tl.maximum(peak, tl.max(product, axis=0))
            mass = mass * tl.exp(peak - higher)
            mass += tl.sum(tl.exp(product - higher[None, :]), axis=0)
            peak = higher
        else:
            if REDUCTION == "softmax":
                product = tl.exp(product * scale - peak[None, :]) / mass[None, :]
            if REDUCTION == "max":
                product = tl.where(one[None, :] < SHARE, product, float("-inf"))
                score = tl.max(product, axis=1)
            else:
                product = tl.where(one[None, :] < SHARE, product, 0.0)
                score = tl.sum(product, axis=1)
            # NaN ranks last, as in the CUDA ops.
            score = tl.where(score == score, score, float("-inf"))
            tl.store(out + index * UNITS + unit, score)
    if REDUCTION == "stats":
        tl.store(stat + split * 2, peak, mask=one < SHARE)
        tl.store(stat + split * 2 + 1, mass, mask=one < SHARE)


@triton.jit
def _merge_stats_kernel(row_lens, stats, splits, BLOCK: tl.constexpr):
    """Peak and mass over all splits, into the first split's place."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    if tl.load(row_lens + row) == 0:
        return
    stat = stats + (row * tl.num_programs(0) + head).to(tl.int64) * splits * 2
    split = tl.arange(0, BLOCK)
    peaks = tl.load(stat + split * 2, mask=split < splits, other=float("-inf"))
    masses = tl.load(stat + split * 2 + 1, mask=split < splits, other=0.0)
    peak = tl.max(peaks, axis=0)
    mass = tl.sum(tl.where(masses > 0, masses * tl.exp(peaks - peak), 0.0), axis=0)
    tl.store(stat, peak)
    tl.store(stat + 1, mass)


def scores_of_row(
    scores: Tensor, num_kv_heads: int, newest: int, reduction: str, scale: float
) -> Tensor:
    """One row's scores in plain torch: (H, n) of the units in full groups -> (G, n + newest).

    newest: units of the newest group, which get infinity.
    """
    scores = reduce_heads(scores, num_kv_heads, reduction, scale)
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    return torch.nn.functional.pad(scores, (0, newest), value=float("inf"))
