"""The best units of every row and KV head, exactly, in ascending order."""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.ops.retrieval.rows import RetrievalRows

# How far each digit of a key is shifted, from the top. Triton's histogram takes time for each bin:
# four passes with few bins are faster than three with many.
_SHIFTS = (24, 16, 8, 0)
_BITS = 8
_BINS = 1 << _BITS
_BLOCK = 2048
# How many programs scan scores in all.
_PROGRAMS = 1024
_MAX_SPLITS = 64
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
        splits = min(max(_PROGRAMS // (kv_heads * num_rows), 1), _MAX_SPLITS)
        splits = splits if scores.is_cuda else 1
    device = scores.device
    # By digit where each has its own: no program clears what another still reads.
    digits = len(_SHIFTS) if fused else 1
    pairs = (num_rows, kv_heads)
    histogram = torch.zeros(digits, *pairs, _BINS, dtype=torch.int32, device=device)
    # Before the first digit, and after each.
    state = torch.empty(digits + 1, *pairs, 2, dtype=torch.int32, device=device)
    tallies = torch.empty(*pairs, splits, 2, dtype=torch.int32, device=device)
    what = (scores, rows.lens, rows.budgets, rows.offsets)
    scan = (splits, kv_heads, num_rows)
    for digit, shift in enumerate(_SHIFTS):
        mine = digit if fused else 0
        _count_kernel[scan](
            *what,
            state[mine - 1 if fused else 1],
            state[mine],
            histogram[mine - 1],
            histogram[mine],
            scores.stride(0),
            splits,
            UNIT=unit,
            DIGIT=digit,
            ABOVE=shift + _BITS,
            SHIFT=shift,
            MASK=_BINS - 1,
            BINS=_BINS,
            BLOCK=_BLOCK,
            FUSED=fused,
        )
        if not fused:
            _find_kernel[(kv_heads, num_rows)](
                rows.lens,
                rows.budgets,
                state[1],
                histogram,
                UNIT=unit,
                FIRST=digit == 0,
                SHIFT=shift,
                BINS=_BINS,
            )
    _tally_kernel[scan](
        *what,
        state[-2],
        state[-1],
        histogram[-1],
        tallies,
        scores.stride(0),
        splits,
        UNIT=unit,
        BINS=_BINS,
        BLOCK=_BLOCK,
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
        BLOCK=_BLOCK,
        SPLITS=triton.next_power_of_2(splits),
    )


@triton.jit
def _load_keys(scores, inside):
    """int32 keys in the order of the scores, which sort as unsigned numbers."""
    score = tl.load(scores, mask=inside, other=0.0)
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # Negative zero is zero.
    return tl.where(bits < 0, ~bits, bits ^ -2147483648)


@triton.jit
def _share(num_units, splits, BLOCK: tl.constexpr):
    """The units that this program scans: whole blocks."""
    per_split = tl.cdiv(tl.cdiv(num_units, splits), BLOCK) * BLOCK
    begin = tl.program_id(0) * per_split
    return begin, tl.minimum(begin + per_split, num_units)


@triton.jit
def _found(prefix, wanted, histogram, SHIFT: tl.constexpr, BINS: tl.constexpr):
    """The wanted key's digits up to this one, and how many keys with them are still wanted."""
    bins = tl.arange(0, BINS)
    counted = tl.load(histogram + bins)
    from_top = tl.sum(counted, axis=0) - tl.cumsum(counted, axis=0) + counted
    chosen = tl.max(tl.where(from_top >= wanted, bins, 0), axis=0)
    above = tl.sum(tl.where(bins == chosen, from_top - counted, 0), axis=0)
    return prefix | (chosen << SHIFT), wanted - above


@triton.jit
def _count_kernel(
    scores,
    row_lens,
    row_budgets,
    row_offsets,
    before,
    state,
    last_histogram,
    histogram,
    score_stride,
    splits,
    UNIT: tl.constexpr,
    DIGIT: tl.constexpr,
    ABOVE: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    FUSED: tl.constexpr,
):
    """Adds up how often each digit occurs among keys that begin like the wanted one.

    before: the wanted key's digits so far. If FUSED, those but for the last one, which every
    program finds in `last_histogram`; the first program writes them to `state`.
    """
    head = tl.program_id(1)
    row = tl.program_id(2)
    num_units = tl.cdiv(tl.load(row_lens + row), UNIT)
    budget = tl.load(row_budgets + row)
    if num_units <= budget:
        return
    begin, end = _share(num_units, splits, BLOCK)
    if begin >= end:
        return
    place = row * tl.num_programs(1) + head
    mine = scores + head.to(tl.int64) * score_stride + tl.load(row_offsets + row)
    prefix = 0
    if DIGIT > 0:
        if FUSED:
            wanted = budget
            if DIGIT > 1:
                prefix = tl.load(before + place * 2)
                wanted = tl.load(before + place * 2 + 1)
            found = last_histogram + place.to(tl.int64) * BINS
            prefix, wanted = _found(prefix, wanted, found, ABOVE, BINS)
            if tl.program_id(0) == 0:
                tl.store(state + place * 2, prefix)
                tl.store(state + place * 2 + 1, wanted)
        else:
            prefix = tl.load(before + place * 2)
    at = tl.arange(0, BLOCK)
    counted = tl.zeros((BINS,), tl.int32)
    left_out = tl.zeros((), tl.int32)
    for start in range(begin, end, BLOCK):
        inside = start + at < end
        key = _load_keys(mine + start + at, inside)
        if DIGIT > 0:
            inside = inside & ((key >> ABOVE) == (prefix >> ABOVE))
        counted += tl.histogram(tl.where(inside, (key >> SHIFT) & MASK, 0), BINS)
        left_out += BLOCK - tl.sum(inside.to(tl.int32), axis=0)
    bins = tl.arange(0, BINS)
    counted -= tl.where(bins == 0, left_out, 0)
    tl.atomic_add(histogram + place.to(tl.int64) * BINS + bins, counted, mask=counted > 0)


@triton.jit
def _find_kernel(
    row_lens,
    row_budgets,
    state,
    histogram,
    UNIT: tl.constexpr,
    FIRST: tl.constexpr,
    SHIFT: tl.constexpr,
    BINS: tl.constexpr,
):
    """Finds the wanted key's digit, and how many keys with it are still wanted; clears the bins."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    budget = tl.load(row_budgets + row)
    if tl.cdiv(tl.load(row_lens + row), UNIT) <= budget:
        return
    place = row * tl.num_programs(0) + head
    prefix = 0
    wanted = budget
    if not FIRST:
        prefix = tl.load(state + place * 2)
        wanted = tl.load(state + place * 2 + 1)
    mine = histogram + place.to(tl.int64) * BINS
    prefix, wanted = _found(prefix, wanted, mine, SHIFT, BINS)
    tl.store(state + place * 2, prefix)
    tl.store(state + place * 2 + 1, wanted)
    tl.store(mine + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))


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
    begin, end = _share(num_units, splits, BLOCK)
    place = row * tl.num_programs(1) + head
    mine = scores + head.to(tl.int64) * score_stride + tl.load(row_offsets + row)
    if FUSED:
        prefix = tl.load(before + place * 2)
        wanted = tl.load(before + place * 2 + 1)
        prefix, wanted = _found(prefix, wanted, histogram + place.to(tl.int64) * BINS, 0, BINS)
        if tl.program_id(0) == 0:
            tl.store(state + place * 2, prefix)
            tl.store(state + place * 2 + 1, wanted)
    else:
        prefix = tl.load(state + place * 2)
    threshold = prefix ^ -2147483648
    at = tl.arange(0, BLOCK)
    above = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for start in range(begin, end, BLOCK):
        inside = start + at < end
        key = _load_keys(mine + start + at, inside) ^ -2147483648
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
    begin, end = _share(num_units, splits, BLOCK)
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
    wanted = tl.load(state + place * 2 + 1)
    written += tl.minimum(equal_seen, wanted)
    mine = scores + head.to(tl.int64) * score_stride + tl.load(row_offsets + row)
    threshold = tl.load(state + place * 2) ^ -2147483648
    for start in range(begin, end, BLOCK):
        inside = start + at < end
        key = _load_keys(mine + start + at, inside) ^ -2147483648
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
