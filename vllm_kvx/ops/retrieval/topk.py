"""The best units of every row and KV head, exactly, in ascending order."""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.ops.radix import (
    BINS,
    BLOCK,
    FIELDS,
    find_digits,
    found,
    load_keys,
    share,
    splits_of,
    store,
)
from vllm_kvx.ops.retrieval.rows import RetrievalRows

# Whether a digit is found by the programs that need it, not by a kernel of its own: six launches
# in the place of ten. Off until it is measured: `python -m benchmarks.retrieval` times both.
FUSED = False


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
        splits = splits_of(kv_heads * num_rows) if scores.is_cuda else 1
    pairs = (num_rows, kv_heads)
    tallies = torch.empty(*pairs, splits, 2, dtype=torch.int32, device=scores.device)
    what = (scores, rows.lens, rows.budgets, rows.offsets)
    scan = (splits, kv_heads, num_rows)
    state, histogram = find_digits(what, scan, unit, fused=fused)
    _tally_kernel[scan](
        *what,
        state[-2],
        state[-1],
        histogram[-1],
        tallies,
        scores.stride(0),
        splits,
        UNIT=unit,
        BINS=BINS,
        BLOCK=BLOCK,
        FUSED=fused,
    )
    _emit_kernel[scan](
        *what,
        state[-1],
        tallies,
        scores.stride(0),
        splits,
        indices,
        counts,
        indices.shape[2],
        UNIT=unit,
        BLOCK=BLOCK,
        SPLITS=triton.next_power_of_2(splits),
    )


@triton.jit
def _tally_kernel(
    scores,
    row_lens,
    row_budgets,
    row_offsets,
    before,
    state,
    histogram,
    tallies,
    score_stride,
    splits,
    UNIT: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    FUSED: tl.constexpr,
):
    """Counts keys above the wanted one, and equal to it, in each program's share.

    If FUSED, the wanted key's last digit is found first: see ``_count_kernel``.
    """
    head = tl.program_id(1)
    row = tl.program_id(2)
    num_units = tl.cdiv(tl.load(row_lens + row), UNIT)
    if num_units <= tl.load(row_budgets + row):
        return
    begin, end = share(num_units, splits, BLOCK)
    place = row * tl.num_programs(1) + head
    mine = scores + head.to(tl.int64) * score_stride + tl.load(row_offsets + row)
    if FUSED:
        prefix = tl.load(before + place * FIELDS)
        wanted = tl.load(before + place * FIELDS + 1)
        last = histogram + place.to(tl.int64) * BINS
        prefix, wanted, equal = found(prefix, wanted, last, 0, BINS)
        if tl.program_id(0) == 0:
            store(state + place * FIELDS, prefix, wanted, equal)
    else:
        prefix = tl.load(state + place * FIELDS)
    threshold = prefix ^ -2147483648
    at = tl.arange(0, BLOCK)
    above = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for start in range(begin, end, BLOCK):
        inside = start + at < end
        key = load_keys(mine + start + at, inside, False) ^ -2147483648
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
    tallies,
    score_stride,
    splits,
    indices,
    counts,
    max_units,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Writes the selected units of each program's share."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    place = row * tl.num_programs(1) + head
    num_units = tl.cdiv(tl.load(row_lens + row), UNIT)
    budget = tl.load(row_budgets + row)
    if split == 0:
        tl.store(counts + place, tl.minimum(num_units, budget))
    begin, end = share(num_units, splits, BLOCK)
    out = indices + place.to(tl.int64) * max_units
    at = tl.arange(0, BLOCK)
    if num_units <= budget:
        for start in range(begin, end, BLOCK):
            tl.store(out + start + at, start + at, mask=start + at < end)
        return
    other = tl.arange(0, SPLITS)
    tally = tallies + (place * splits + other) * 2
    written = tl.sum(tl.load(tally, mask=other < split, other=0), axis=0)
    equal_seen = tl.sum(tl.load(tally + 1, mask=other < split, other=0), axis=0)
    wanted = tl.load(state + place * FIELDS + 1)
    written += tl.minimum(equal_seen, wanted)
    mine = scores + head.to(tl.int64) * score_stride + tl.load(row_offsets + row)
    threshold = tl.load(state + place * FIELDS) ^ -2147483648
    for start in range(begin, end, BLOCK):
        inside = start + at < end
        key = load_keys(mine + start + at, inside, False) ^ -2147483648
        equal = (inside & (key == threshold)).to(tl.int32)
        rank = tl.cumsum(equal, axis=0) + equal_seen
        take = inside & ((key > threshold) | ((equal == 1) & (rank <= wanted)))
        taken = take.to(tl.int32)
        target = written + tl.cumsum(taken, axis=0) - 1
        tl.store(out + target, start + at, mask=take)
        equal_seen += tl.sum(equal, axis=0)
        written += tl.sum(taken, axis=0)


def top_units_reference(scores: Tensor, budget: int) -> Tensor:
    """One row and head in plain torch: (n,) scores -> ascending indices of the best, int64."""
    order = (scores + 0.0).sort(descending=True, stable=True).indices[:budget]
    return order.sort().values


def same_selection(scores: Tensor, ours: Tensor, theirs: Tensor) -> bool:
    """Whether two selections differ in tied units alone."""
    return bool(torch.equal(scores[ours].sort().values, scores[theirs].sort().values))
