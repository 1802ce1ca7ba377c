"""Scores of the units that a decode step may read, from scales, zeros and codes alone."""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.equations.retrieval import SOFTMAX_FACTOR, reduce_heads
from vllm_kvx.ops.retrieval.index_layout import Sidecar
from vllm_kvx.ops.retrieval.rows import RetrievalRows

# As many as an H100 holds at a time: 20 on each multiprocessor.
SCORE_PROGRAMS = 2640
# Warps of a program, and how far its loop is pipelined: loads of codes wait for the block table's,
# so with 5 stages the codes of two steps are under way while a third one is scored.
SCORE_WARPS = 1
SCORE_STAGES = 5
# Tokens of a group that a program scores at a time, at most.
MAX_STEP: tl.constexpr = tl.constexpr(64)
# Of each half of a word the top bit, and minus one in each half, of float16.
_TOP_BITS: tl.constexpr = tl.constexpr(0x80008000 - (1 << 32))
_MINUS_ONES = 0xBC00BC00 - (1 << 32)


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
        scale: of attention's softmax. splits: programs that share a row.
        has_codes: units are tokens, scored by their 1-bit codes; otherwise they are groups, scored
            by the bounds that scales and zeros give.
    """
    shape = sidecar.shape
    heads = query.shape[1]
    share = heads // shape.num_kv_heads
    exact = query.dtype == torch.float32
    # Matrix instructions want 8 columns or more; a product is the sum of two of float16.
    padded = max(16 if exact else 4, triton.next_power_of_2(share))
    # Exact products take much shared memory, and are for tests; bounds need few instructions.
    stages = (1 if exact else SCORE_STAGES) if has_codes else 3
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
        scale * SOFTMAX_FACTOR,
        _MINUS_ONES,
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
        HAS_CODES=has_codes,
        EXACT=exact,
        STAGES=stages,
        # One warp's registers do not hold the weights of many heads and channels.
        num_warps=SCORE_WARPS if shape.head_dim * padded <= 2048 else max(SCORE_WARPS, 2),
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


@triton.jit(do_not_specialize=["minus_ones", "table_stride", "score_stride", "splits"])
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
    minus_ones,
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
    HAS_CODES: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores a row and head's share of the units.

    A key is z + s b with b = -1 or 1, so its product with a query is q z + (q s) b: two matrix
    products whose rows are tokens. A code word becomes pairs of float16 by a shift and one logical
    operation: see ``sidecar.WORD``. `minus_ones` is an argument since compilers make two operations
    of that one where they know both of its constants.

    In float16 q s loses half of its digits, so a head has two columns: q s rounded, and the
    rounding error, which is q s - (q s rounded) in one operation that rounds once.
    """
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    # All at once: each is a trip to memory.
    length = tl.load(row_lens + row)
    token = tl.load(row_tokens + row).to(tl.int64)
    request = tl.load(row_requests + row).to(tl.int64)
    offset = tl.load(row_offsets + row)
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
    out = scores + head.to(tl.int64) * score_stride + offset
    if REDUCTION != "stats" and split == 0:
        last = length if HAS_CODES else num_groups + 1
        for later in range(GROUP // STEP):
            newest = (steps + later) * UNITS + unit
            tl.store(out + newest, float("inf"), mask=newest < last)

    table = block_table + request * table_stride
    first_head = query + token * query_stride + head * SHARE * query_head_stride
    one = tl.arange(0, PADDED)
    depth = tl.arange(0, D)
    # What products are multiplied with.
    undo = 1.0
    if HAS_CODES:
        WORDS: tl.constexpr = D // 32
        PARTS: tl.constexpr = 1 if EXACT else 2
        COLUMNS: tl.constexpr = PADDED * PARTS
        # The order in which a matrix instruction's lanes find all channels of a word in that word:
        # four channels of the first word, four of the second one, and so on.
        channel = depth // 4 % WORDS * 32 + depth // (4 * WORDS) * 4 + depth % 4
        column = tl.arange(0, COLUMNS)
        at = (column // PARTS)[None, :] * query_head_stride + channel[:, None]
        is_head = (column // PARTS)[None, :] < SHARE
        q = tl.load(first_head + at, mask=is_head, other=0.0).to(tl.float32)
        if EXACT:
            weight = q
            plain = q
        else:
            # Brought to a largest magnitude in [1, 2), for float16 to hold it and its products.
            largest = tl.max(tl.max(tl.abs(q), axis=1), axis=0)
            exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
            exponent = tl.minimum(tl.maximum(exponent, -100), 126)
            undo = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
            q = (q * ((127 - exponent) << 23).to(tl.float32, bitcast=True)).to(tl.float16)
            is_error = (column % 2)[None, :].to(tl.float16)
            weight = q * (1 - 2 * is_error)
            error = q * is_error
            plain = q * (1 - is_error)
        code = unit[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        shift = tl.arange(0, 8)[None, :, None, None] * 2 + tl.arange(0, 2)[None, None, None, :]
    else:
        channel = depth
        at = one[None, :] * query_head_stride + channel[:, None]
        narrow = tl.load(first_head + at, mask=one[None, :] < SHARE, other=0.0).to(tl.float32)

    stat = stats + ((row * tl.num_programs(1) + head) * SHARE + one).to(tl.int64) * splits * 2
    peak = tl.full((PADDED,), float("-inf"), tl.float32)
    mass = tl.zeros((PADDED,), tl.float32)
    if REDUCTION == "softmax":
        peak = tl.load(stat, mask=one < SHARE, other=0.0)
        mass = tl.load(stat + 1, mask=one < SHARE, other=1.0)

    for index in tl.range(begin, end, num_stages=STAGES):
        block = tl.load(table + index * STEP // BLOCK_SIZE).to(tl.int64)
        slot = index * STEP % BLOCK_SIZE
        pair = scales + block * scale_block_stride + head * scale_head_stride
        pair += slot // GROUP * (2 * D)
        step = tl.load(pair + channel)
        zero = tl.load(pair + D + channel)
        if HAS_CODES:
            word = codes + block * code_block_stride + head * code_head_stride + slot * WORDS
            word = tl.load(word + code)
            signs = ((word[:, None, :, None] << shift) & _TOP_BITS) ^ minus_ones
            even = signs.to(tl.int16).to(tl.float16, bitcast=True)
            odd = (signs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
            sign = tl.reshape(tl.join(even, odd), (UNITS, D))
            if EXACT:
                sign = sign.to(tl.float32)
                zero = zero.to(tl.float32)
                factor = weight * step.to(tl.float32)[:, None]
            else:
                step = tl.broadcast_to(step[:, None], (D, COLUMNS))
                factor = tl.fma(error, step, weight * step)
            zero = tl.broadcast_to(zero[None, :], (UNITS, D))
            product = tl.dot(zero, plain, input_precision="ieee")
            product = tl.dot(sign, factor, product, input_precision="ieee")
            if PARTS > 1:
                product = tl.sum(tl.reshape(product, (UNITS, PADDED, PARTS)), axis=2)
        else:
            bias = tl.sum(narrow * zero.to(tl.float32)[:, None], axis=0)
            bound = bias + tl.sum(tl.abs(narrow) * step.to(tl.float32)[:, None], axis=0)
            product = tl.reshape(bound, (1, PADDED))
        if REDUCTION == "stats":
            product = product * (scale * undo)
            higher = tl.maximum(peak, tl.max(product, axis=0))
            mass = mass * tl.exp(peak - higher)
            mass += tl.sum(tl.exp(product - higher[None, :]), axis=0)
            peak = higher
        else:
            if REDUCTION == "softmax":
                product = tl.exp(product * (scale * undo) - peak[None, :]) / mass[None, :]
            if REDUCTION == "max":
                product = tl.where(one[None, :] < SHARE, product, float("-inf"))
                score = tl.max(product, axis=1)
            else:
                product = tl.where(one[None, :] < SHARE, product, 0.0)
                score = tl.sum(product, axis=1)
            if REDUCTION != "softmax":
                score *= undo
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
    """Makes scores of query heads one row's scores by KV head, in plain torch.

    scores: (H, n), of the units in full groups. newest: units of the newest group, whose scores are
        infinite. reduction, scale: see `reduce_heads`.
    Returns: (G, n + newest), the dtype of `scores`; a nan becomes -inf.
    """
    scores = reduce_heads(scores, num_kv_heads, reduction, scale)
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    return torch.nn.functional.pad(scores, (0, newest), value=float("inf"))
