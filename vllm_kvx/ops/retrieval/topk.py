"""The best units of every row and KV head, exactly, in ascending order."""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.ops.radix import BINS, FIELDS, find_digits, found, order_of, share
from vllm_kvx.ops.retrieval.rows import RetrievalRows

# Whether a digit is found by the programs that need it, not by a kernel of its own, and the last
# digit's are counted by program: six launches in the place of eleven.
# `python -m benchmarks.ops.retrieval_triton` times both.
FUSED = True
# How many programs scan scores in all, and at most those of one row and head; scores that a program
# reads at a time: twice as many take twice the registers, and fewer programs run at a time. Chosen
# by h200-retrieval-triton.json; within 6% of it are 512 to 2,048 programs.
SELECT_PROGRAMS = 768
MAX_SPLITS = 128
BLOCK = 1024


def top_units(
    scores: Tensor,
    rows: RetrievalRows,
    indices: Tensor,
    counts: Tensor,
    *,
    unit: int,
    splits: int | None = None,
    fused: bool | None = None,
) -> None:
    """Writes the `budgets` best units of each row, ascending; of equal scores the lower index wins.

    A radix select. Unlike in vLLM's top-k ops, each row has its own count, and its scores begin at
    an offset of its own.

    Args:
        scores: (G, capacity) float32, no NaN; each row's at its offset.
        indices: (R, G, K) int32; counts: (R, G) int32, 0 where the row does not retrieve.
        unit: tokens per unit. splits: programs that share a row and head; chosen if not given.
        fused: see FUSED, which is taken if not given.
    """
    fused = FUSED if fused is None else fused
    kv_heads, num_rows = scores.shape[0], rows.lens.shape[0]
    if splits is None:
        most = min(SELECT_PROGRAMS // (kv_heads * num_rows), MAX_SPLITS)
        splits = max(most, 1) if scores.is_cuda else 1
    what = (scores, rows.lens, rows.budgets, rows.offsets)
    scan = (splits, kv_heads, num_rows)
    digits = find_digits(what, scan, unit, fused=fused, block=BLOCK)
    tallies = digits.tallies
    if not fused:
        tallies = torch.empty(
            num_rows, kv_heads, splits, 2, dtype=torch.int32, device=scores.device
        )
        _tally_kernel[scan](
            *what,
            digits.state[-1],
            tallies,
            scores.stride(0),
            splits,
            UNIT=unit,
            BLOCK=BLOCK,
        )
    _emit_kernel[scan](
        *what,
        digits.state[-2 if fused else -1],
        digits.histogram[-1],
        tallies,
        scores.stride(0),
        splits,
        indices,
        counts,
        indices.shape[2],
        UNIT=unit,
        BINS=BINS,
        BLOCK=BLOCK,
        SPLITS=max(MAX_SPLITS, triton.next_power_of_2(splits)),
        FUSED=fused,
    )


@triton.jit
def _tally_kernel(
    scores,
    row_lens,
    row_budgets,
    row_offsets,
    state,
    tallies,
    score_stride,
    splits,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts keys above the wanted one, and equal to it, in each program's share."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    num_units = tl.cdiv(tl.load(row_lens + row), UNIT)
    if num_units <= tl.load(row_budgets + row):
        return
    begin, end = share(num_units, splits, BLOCK)
    place = row * tl.num_programs(1) + head
    mine = scores + head.to(tl.int64) * score_stride + tl.load(row_offsets + row)
    threshold = tl.load(state + place * FIELDS) ^ -2147483648
    at = tl.arange(0, BLOCK)
    above = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for start in range(begin, end, BLOCK):
        inside = start + at < end
        score = tl.load(mine + start + at, mask=inside, other=0.0)
        key = order_of(score, False) ^ -2147483648
        above += tl.sum((inside & (key > threshold)).to(tl.int32), axis=0)
        equal += tl.sum((inside & (key == threshold)).to(tl.int32), axis=0)
    tally = tallies + (place * splits + tl.program_id(0)) * 2
    tl.store(tally, above)
    tl.store(tally + 1, equal)


@triton.jit
def _emit_kernel(
    scores,
    row_lens,
    row_budgets,
    row_offsets,
    state,
    histogram,
    tallies,
    score_stride,
    splits,
    indices,
    counts,
    max_units,
    UNIT: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    FUSED: tl.constexpr,
):
    """Writes the selected units of each program's share.

    If FUSED, the wanted key's last digit is found first, and tallies are by its value.
    """
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    place = row * tl.num_programs(1) + head
    num_units = tl.cdiv(tl.load(row_lens + row), UNIT)
    budget = tl.load(row_budgets + row)
    offset = tl.load(row_offsets + row)
    if split == 0:
        tl.store(counts + place, tl.minimum(num_units, budget))
    begin, end = share(num_units, splits, BLOCK)
    out = indices + place.to(tl.int64) * max_units
    at = tl.arange(0, BLOCK)
    if num_units <= budget:
        for start in range(begin, end, BLOCK):
            tl.store(out + start + at, start + at, mask=start + at < end)
        return
    if begin >= end:
        return
    mine = scores + head.to(tl.int64) * score_stride + offset
    following = tl.load(mine + begin + at, mask=begin + at < end, other=0.0)
    prefix = tl.load(state + place * FIELDS)
    wanted = tl.load(state + place * FIELDS + 1)
    other = tl.arange(0, SPLITS)
    if FUSED:
        last = histogram + place.to(tl.int64) * BINS
        prefix, wanted, _ = found(prefix, wanted, last, 0, BINS)
        tally = tallies + (place * splits + other).to(tl.int64) * (2 * BINS) + (prefix & (BINS - 1))
        next_tally = BINS
    else:
        tally = tallies + (place * splits + other) * 2
        next_tally = 1
    above_seen = tl.sum(tl.load(tally, mask=other < split, other=0), axis=0)
    equal_seen = tl.sum(tl.load(tally + next_tally, mask=other < split, other=0), axis=0)
    threshold = prefix ^ -2147483648
    for start in range(begin, end, BLOCK):
        inside = start + at < end
        key = order_of(following, False) ^ -2147483648
        later = start + BLOCK + at
        following = tl.load(mine + later, mask=later < end, other=0.0)
        above = inside & (key > threshold)
        equal = inside & (key == threshold)
        # One scan for both: of equal keys above bit 16.
        both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        before = tl.cumsum(both, axis=0) - both
        rank = equal_seen + (before >> 16)
        target = above_seen + (before & 65535) + tl.minimum(rank, wanted)
        tl.store(out + target, start + at, mask=above | (equal & (rank < wanted)))
        counted = tl.sum(both, axis=0)
        above_seen += counted & 65535
        equal_seen += counted >> 16


def top_units_reference(scores: Tensor, budget: int) -> Tensor:
    """Selects the `budget` best units of one row and head, in plain torch; the first of equal ones.

    scores: (n,), any float dtype. Returns: (min(budget, n),) int64, ascending.
    """
    order = (scores + 0.0).sort(descending=True, stable=True).indices[:budget]
    return order.sort().values
