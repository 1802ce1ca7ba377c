"""The score that separates the best of every row and KV head, found by many programs each."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

# How far each digit of a key is shifted, from the top. Triton's histogram takes time for each bin:
# four passes with few bins are faster than three with many.
_SHIFTS = (24, 16, 8, 0)
_BITS = 8
BINS = 1 << _BITS
# Scores that a program reads at a time.
BLOCK = 2048
# From how many scores on this is how what stays of a prompt is found, and not by the one program
# that writes it. On an H200 it takes 0.4 of that one's time at 130,000 scores, 0.8 at 32,768, 1.2
# at 8,192, and six times as long to launch (benchmarks/results/ops/h200-retention-ops.json).
SHARED_FROM = 65536
# How many programs scan scores in all.
_PROGRAMS = 1024
_MAX_SPLITS = 64
# What is known of a row and head after a digit: the wanted key so far, how many with it are still
# wanted, and how many there are.
FIELDS = tl.constexpr(3)


@contextlib.contextmanager
def always_shared() -> Iterator[None]:
    """Inside, scores are shared however few they are: what long prompts run, for short ones."""
    global SHARED_FROM
    usual, SHARED_FROM = SHARED_FROM, 0
    try:
        yield
    finally:
        SHARED_FROM = usual


def splits_of(num_pairs: int) -> int:
    """How many programs share the scores of one row and head, of so many in all."""
    return min(max(_PROGRAMS // num_pairs, 1), _MAX_SPLITS)


def find_bounds(
    scores: Tensor, lens: Tensor, budgets: Tensor, offsets: Tensor, splits: int
) -> Tensor:
    """The score that separates the best `budgets[r]` of the first `lens[r]`, by row and head.

    Args:
        scores: (G, capacity) float32, at least 0; row r's begin at offsets[r]. Their bits as int32
            are their order.
        lens, budgets: (R,) int32. offsets: (R,) int64, or more.
        splits: programs that share a row and head.

    Returns:
        (R, G, 3) int32: the bound's bits with the sign bit turned, how many scores equal to it are
        among the best, and how many there are. Not written where there
        are no more scores than `budgets`.
    """
    what = (scores, lens, budgets, offsets)
    scan = (splits, scores.shape[0], lens.shape[0])
    return find_digits(what, scan, 1, fused=False, by_bits=True).state[-1]


@dataclass(frozen=True)
class Digits:
    """What is known of the wanted keys once their digits are counted.

    Attributes:
        state: (digits + 1, R, G, 3) int32, see FIELDS; by digit where each has its own, else 2.
        histogram: (digits, R, G, 256) int32: how often a digit occurs, likewise.
        tallies: (R, G, splits, 2, 256) int32 if fused: for each value that the last digit may have,
            how many keys of a program's share are above the wanted key, and how many equal to it.
    """

    state: Tensor
    histogram: Tensor
    tallies: Tensor


def find_digits(
    what: tuple[Tensor, Tensor, Tensor, Tensor],
    scan: tuple[int, int, int],
    unit: int,
    *,
    fused: bool,
    by_bits: bool = False,
    block: int = BLOCK,
) -> Digits:
    """Finds all digits of the wanted keys but, if `fused`, the last one, which is counted alone.

    Args:
        what: scores, lens, budgets and offsets, as `find_bounds` has them; lens in tokens.
        scan: programs that share a row and head, heads, rows. unit: tokens of a score.
        by_bits: see ``order_of``. block: scores that a program reads at a time.
    """
    scores, lens, budgets, _ = what
    splits, kv_heads, num_rows = scan
    device = scores.device
    # By digit where each has its own: no program clears what another still reads.
    digits = len(_SHIFTS) if fused else 1
    pairs = (num_rows, kv_heads)
    histogram = torch.zeros(digits, *pairs, BINS, dtype=torch.int32, device=device)
    # Before the first digit, and after each.
    state = torch.empty(digits + 1, *pairs, FIELDS.value, dtype=torch.int32, device=device)
    tallies = torch.empty(*pairs, splits, 2, BINS if fused else 0, dtype=torch.int32, device=device)
    for digit, shift in enumerate(_SHIFTS):
        mine = digit if fused else 0
        _count_kernel[scan](
            *what,
            state[mine - 1 if fused else 1],
            state[mine],
            histogram[mine - 1],
            histogram[mine],
            tallies,
            scores.stride(0),
            splits,
            UNIT=unit,
            DIGIT=digit,
            ABOVE=shift + _BITS,
            SHIFT=shift,
            MASK=BINS - 1,
            BINS=BINS,
            BLOCK=block,
            BY_BITS=by_bits,
            FUSED=fused,
            LAST=shift == 0,
        )
        if not fused:
            _find_kernel[(kv_heads, num_rows)](
                lens,
                budgets,
                state[1],
                histogram,
                UNIT=unit,
                FIRST=digit == 0,
                SHIFT=shift,
                BINS=BINS,
            )
    return Digits(state, histogram, tallies)


@triton.jit
def order_of(score, BY_BITS: tl.constexpr):
    """int32 keys in the order of the scores, which sort as unsigned numbers.

    BY_BITS: scores are at least 0, and the order is that of their bits as int32, NaN's too.
    """
    if BY_BITS:
        return score.to(tl.int32, bitcast=True) ^ -2147483648
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # Negative zero is zero.
    return tl.where(bits < 0, ~bits, bits ^ -2147483648)


@triton.jit
def share(num_units, splits, BLOCK: tl.constexpr):
    """The units that this program scans: whole blocks."""
    per_split = tl.cdiv(tl.cdiv(num_units, splits), BLOCK) * BLOCK
    begin = tl.program_id(0) * per_split
    return begin, tl.minimum(begin + per_split, num_units)


@triton.jit
def found(prefix, wanted, histogram, SHIFT: tl.constexpr, BINS: tl.constexpr):
    """The wanted key with this digit, how many like it are still wanted, and how many there are."""
    bins = tl.arange(0, BINS)
    counted = tl.load(histogram + bins)
    from_top = tl.sum(counted, axis=0) - tl.cumsum(counted, axis=0) + counted
    chosen = tl.max(tl.where(from_top >= wanted, bins, 0), axis=0)
    above = tl.sum(tl.where(bins == chosen, from_top - counted, 0), axis=0)
    equal = tl.sum(tl.where(bins == chosen, counted, 0), axis=0)
    return prefix | (chosen << SHIFT), wanted - above, equal


@triton.jit
def store(state, prefix, wanted, equal):
    tl.store(state, prefix)
    tl.store(state + 1, wanted)
    tl.store(state + 2, equal)


@triton.jit(
    do_not_specialize=[
        "row_lens",
        "row_budgets",
        "row_offsets",
        "before",
        "state",
        "last_histogram",
        "histogram",
        "tallies",
        "score_stride",
        "splits",
    ],
)
def _count_kernel(
    scores,
    row_lens,
    row_budgets,
    row_offsets,
    before,
    state,
    last_histogram,
    histogram,
    tallies,
    score_stride,
    splits,
    UNIT: tl.constexpr,
    DIGIT: tl.constexpr,
    ABOVE: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_BITS: tl.constexpr,
    FUSED: tl.constexpr,
    LAST: tl.constexpr,
):
    """Adds up how often each digit occurs among keys that begin like the wanted one.

    before: the wanted key's digits so far. If FUSED, those but for the last one, which every
    program finds in `last_histogram`; the first program writes them to `state`. If it is the LAST
    digit, too, every program writes its `tallies`: see ``Digits``.
    """
    head = tl.program_id(1)
    row = tl.program_id(2)
    num_units = tl.cdiv(tl.load(row_lens + row), UNIT)
    budget = tl.load(row_budgets + row)
    offset = tl.load(row_offsets + row)
    if num_units <= budget:
        return
    begin, end = share(num_units, splits, BLOCK)
    if begin >= end:
        return
    place = row * tl.num_programs(1) + head
    mine = scores + head.to(tl.int64) * score_stride + offset
    at = tl.arange(0, BLOCK)
    # On their way while the last digit is found, as the next ones are while these are counted.
    following = tl.load(mine + begin + at, mask=begin + at < end, other=0.0)
    prefix = 0
    if DIGIT > 0:
        if FUSED:
            wanted = budget
            if DIGIT > 1:
                prefix = tl.load(before + place * FIELDS)
                wanted = tl.load(before + place * FIELDS + 1)
            last = last_histogram + place.to(tl.int64) * BINS
            prefix, wanted, equal = found(prefix, wanted, last, ABOVE, BINS)
            if tl.program_id(0) == 0:
                store(state + place * FIELDS, prefix, wanted, equal)
        else:
            prefix = tl.load(before + place * FIELDS)
    counted = tl.zeros((BINS,), tl.int32)
    left_out = tl.zeros((), tl.int32)
    above = tl.zeros((), tl.int32)
    for start in range(begin, end, BLOCK):
        inside = start + at < end
        key = order_of(following, BY_BITS)
        later = start + BLOCK + at
        following = tl.load(mine + later, mask=later < end, other=0.0)
        if DIGIT > 0:
            # As signed numbers.
            top = (key ^ -2147483648) >> ABOVE
            wanted_top = (prefix ^ -2147483648) >> ABOVE
            if FUSED and LAST:
                above += tl.sum((inside & (top > wanted_top)).to(tl.int32), axis=0)
            inside = inside & (top == wanted_top)
        counted += tl.histogram(tl.where(inside, (key >> SHIFT) & MASK, 0), BINS)
        left_out += BLOCK - tl.sum(inside.to(tl.int32), axis=0)
    bins = tl.arange(0, BINS)
    counted -= tl.where(bins == 0, left_out, 0)
    tl.atomic_add(histogram + place.to(tl.int64) * BINS + bins, counted, mask=counted > 0)
    if FUSED and LAST:
        tally = tallies + (place * splits + tl.program_id(0)).to(tl.int64) * (2 * BINS) + bins
        above += tl.sum(counted, axis=0)
        tl.store(tally, above - tl.cumsum(counted, axis=0))
        tl.store(tally + BINS, counted)


@triton.jit(do_not_specialize=["row_lens", "row_budgets", "state"])
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
        prefix = tl.load(state + place * FIELDS)
        wanted = tl.load(state + place * FIELDS + 1)
    mine = histogram + place.to(tl.int64) * BINS
    prefix, wanted, equal = found(prefix, wanted, mine, SHIFT, BINS)
    store(state + place * FIELDS, prefix, wanted, equal)
    tl.store(mine + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
