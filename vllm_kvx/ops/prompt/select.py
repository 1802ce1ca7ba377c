"""Which keys stay, exactly, and the moves that bring them to the first slots.

A row of scores is one KV head, or one for all heads. Per row, request f keeps the best-scored
keys outside its window and the window itself, `caps[f]` in all. Max-pooling makes equal scores
the common case rather than a corner: of these the keys with the highest unpooled scores stay,
then those of the lowest index. Counts are known on the host; the device only decides which keys
they are.
"""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.equations import saliency as dense
from vllm_kvx.ops import radix

# Scores that the program of one row and request reads at a time.
_BLOCK = 8192


def select_kept(
    scores: Tensor,
    num_keys: Tensor,
    windows: Tensor,
    caps: Tensor,
    offsets: Tensor,
    out_offsets: Tensor,
    total_kept: int,
    block: int = _BLOCK,
    unpooled: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Indices of the kept keys, ascending, counted from the request's first key.

    Args:
        scores: (R, total_keys) float32, at least 0 (NaN ranks above all); unit stride along
            a row. Columns of window keys are not read.
        num_keys: (F,) int32, on the device as are the next four; 0 for padding.
        windows: (F,) int32, at most num_keys[f].
        caps: (F,) int32, at least windows[f]. All keys are kept if there are no more.
        offsets: (F + 1,) int64, exclusive cumulative sum of `num_keys`.
        out_offsets: (F + 1,) int64, exclusive cumulative sum of min(caps, num_keys).
        total_kept: columns of the result, at least out_offsets[F].
        block: scores read at a time, a power of two, at most 16384.
        unpooled: (R, total_keys) float32, what decides among equal scores; unit stride along a row.
            It is read only where some of them stay and others do not. None: their index decides.
        splits: programs that share a row to find its bound; 0 leaves it to the one that writes what
            stays, None to `radix.SHARED_FROM`.

    Returns:
        (R, total_kept) int32, request f in columns out_offsets[f]:out_offsets[f + 1]; those from
        out_offsets[F] on are not written.
    """
    kept = torch.empty(scores.shape[0], total_kept, dtype=torch.int32, device=scores.device)
    sizes = (num_keys, windows, caps, offsets, out_offsets)
    _select(scores, unpooled, *sizes, kept, None, None, block, splits)
    return kept


def select_moves(
    scores: Tensor,
    num_keys: Tensor,
    windows: Tensor,
    caps: Tensor,
    offsets: Tensor,
    out_offsets: Tensor,
    total_kept: int,
    block: int = _BLOCK,
    unpooled: Tensor | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Moves after which the first caps[f] slots hold exactly the kept keys.

    Kept keys below the cap stay where they are; those above it go to the slots of keys that were
    not kept, so sources and targets have no slot in common and moves need no order.

    Args:
        As for `select_kept`.

    Returns:
        sources, targets: (R, total_kept) int32, ascending keys of request f from column
            out_offsets[f] on, of which the first num_moves[r, f] are written.
        num_moves: (R, F) int32.
    """
    rows = scores.shape[0]
    sources = torch.empty(rows, total_kept, dtype=torch.int32, device=scores.device)
    targets = torch.empty_like(sources)
    num_moves = sources.new_empty(rows, num_keys.shape[0])
    sizes = (num_keys, windows, caps, offsets, out_offsets)
    _select(scores, unpooled, *sizes, sources, targets, num_moves, block, splits)
    return sources, targets, num_moves


def _select(
    scores: Tensor,
    unpooled: Tensor | None,
    num_keys: Tensor,
    windows: Tensor,
    caps: Tensor,
    offsets: Tensor,
    out_offsets: Tensor,
    first_out: Tensor,
    targets: Tensor | None,
    num_moves: Tensor | None,
    block: int,
    splits: int | None,
) -> None:
    requests = num_keys.shape[0]
    if not (requests and scores.shape[0]):
        return
    if splits is None:
        shares = scores.is_cuda and scores.shape[1] >= radix.SHARED_FROM
        splits = radix.splits_of(scores.shape[0] * requests) if shares else 0
    bounds = None
    if splits:
        outside = num_keys - windows
        bounds = radix.find_bounds(scores, outside, caps - windows, offsets, splits)
    _select_kernel[(scores.shape[0], requests)](
        scores,
        scores.stride(0),
        unpooled,
        0 if unpooled is None else unpooled.stride(0),
        num_keys,
        windows,
        caps,
        offsets,
        out_offsets,
        first_out,
        targets,
        first_out.stride(0),
        num_moves,
        bounds,
        BOUNDED=bounds is not None,
        MOVES=targets is not None,
        POOLED=unpooled is not None,
        BLOCK=block,
        num_warps=16 if block >= 4096 else 4,
    )


@triton.jit
def threshold(scores, count, wanted, BLOCK: tl.constexpr):
    """Score that separates the wanted best of `count`, by bisection on its bits.

    Returns:
        low: bits of the bound, int32. All scores above it are wanted.
        ties: how many of those equal to it are, or more than there are.
    """
    low, ties, _ = _bisect(scores, scores, 0, 0, count, count, wanted, False, BLOCK)
    return low, ties


@triton.jit
def _bisect(
    scores, others, other, first, end, count, wanted, AMONG: tl.constexpr, BLOCK: tl.constexpr
):
    """The bound of the wanted best of scores[first:end], by bisection on its bits.

    float32 bits order as int32 where the sign is not set. Each pass finds two of them, until the
    scores from the bound on are exactly as many as wanted, or no bits are left.

    With AMONG it is the bound of those scores alone beside which `others` holds the bits `other`.
    count: how many scores there are.

    Returns:
        low, ties: as `threshold` has them.
        equal: how many are equal to `low`, if that is more than are wanted of them; at most as many
            otherwise.
    """
    low = tl.full((), -2147483648, dtype=tl.int32)
    at_least_low = count
    # Scores known to be out of the interval that starts at `low`, above it.
    above = tl.zeros_like(count)
    shift = tl.full((), 30, dtype=tl.int32)
    while (shift >= 0) & (at_least_low != wanted):
        step = tl.full((), 1, dtype=tl.int32) << shift
        bound_1 = low + step
        bound_2 = bound_1 + step
        bound_3 = bound_2 + step
        # No sum crosses threads before the pass is over.
        count_1 = tl.zeros((BLOCK,), dtype=tl.int32)
        count_2 = tl.zeros((BLOCK,), dtype=tl.int32)
        count_3 = tl.zeros((BLOCK,), dtype=tl.int32)
        for begin in range(first, end, BLOCK):
            key = begin + tl.arange(0, BLOCK)
            counted = key < end
            if AMONG:
                beside = tl.load(others + key, mask=counted, other=0.0).to(tl.int32, bitcast=True)
                counted &= beside == other
            score = tl.load(scores + key, mask=counted, other=0.0).to(tl.int32, bitcast=True)
            score = tl.where(counted, score, -2147483648)
            count_1 += (score >= bound_1).to(tl.int32)
            count_2 += (score >= bound_2).to(tl.int32)
            count_3 += (score >= bound_3).to(tl.int32)
        from_1, from_2, from_3 = tl.sum(count_1), tl.sum(count_2), tl.sum(count_3)
        if from_3 >= wanted:
            low = bound_3
            at_least_low = from_3
        elif from_2 >= wanted:
            low = bound_2
            at_least_low = from_2
            above = from_3
        elif from_1 >= wanted:
            low = bound_1
            at_least_low = from_1
            above = from_2
        else:
            above = from_1
        shift -= 2
    return low, wanted - above, tl.where(at_least_low == wanted, 0, at_least_low - above)


@triton.jit
def cut(scores, unpooled, outside, wanted, POOLED: tl.constexpr, BLOCK: tl.constexpr):
    """Finds the bound of the `wanted` best among the first `outside` scores.

    unpooled: what decides among equal scores; not read unless POOLED.

    Returns:
        low: bits of the bound; all scores above it are wanted.
        low_peak, cuts: if not all scores equal to `low` are wanted, `cuts` is true, and those whose
            unpooled bits are above `low_peak` are.
        ties_wanted: how many are wanted of those that are equal in both.
    """
    low, ties_wanted, equal = _bisect(scores, scores, 0, 0, outside, outside, wanted, False, BLOCK)
    low_peak, cuts, ties_wanted = _among_equal(
        scores, unpooled, outside, low, ties_wanted, equal, POOLED, BLOCK
    )
    return low, low_peak, cuts, ties_wanted


@triton.jit
def _among_equal(
    scores, unpooled, outside, low, ties_wanted, equal, POOLED: tl.constexpr, BLOCK: tl.constexpr
):
    """`cut` where the bound is known. equal: how many scores are, if that is more than wanted."""
    cuts = equal > 0
    low_peak = tl.full((), -2147483648, dtype=tl.int32)
    if POOLED:  # noqa: SIM102 (one is known when the kernel is compiled)
        if cuts:
            # A plateau is narrow: only the keys from its first to its last are read again.
            first = outside
            last = tl.zeros_like(outside)
            for begin in range(0, outside, BLOCK):
                key = begin + tl.arange(0, BLOCK)
                score = tl.load(scores + key, mask=key < outside, other=0.0)
                tied = (key < outside) & (score.to(tl.int32, bitcast=True) == low)
                first = tl.minimum(first, tl.min(tl.where(tied, key, outside)))
                last = tl.maximum(last, tl.max(tl.where(tied, key, 0)))
            low_peak, ties_wanted, _ = _bisect(
                unpooled, scores, low, first, last + 1, equal, ties_wanted, True, BLOCK
            )
    return low_peak, cuts, ties_wanted


@triton.jit(
    do_not_specialize=[
        "scores_stride",
        "unpooled_stride",
        "num_keys",
        "windows",
        "caps",
        "offsets",
        "out_offsets",
        "out_stride",
        "num_moves",
        "bounds",
    ],
)
def _select_kernel(
    scores,
    scores_stride,
    unpooled,
    unpooled_stride,
    num_keys,
    windows,
    caps,
    offsets,
    out_offsets,
    kept_or_sources,
    targets,
    out_stride,
    num_moves,
    bounds,
    BOUNDED: tl.constexpr,
    MOVES: tl.constexpr,
    POOLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1)
    length = tl.load(num_keys + request)
    cap = tl.load(caps + request)
    outside = length - tl.load(windows + request)
    wanted = tl.minimum(cap - (length - outside), outside)
    scores += row * scores_stride + tl.load(offsets + request)
    out = row * out_stride + tl.load(out_offsets + request)
    if POOLED:
        unpooled += row * unpooled_stride + tl.load(offsets + request)
    if BOUNDED:
        low = tl.full((), -2147483648, dtype=tl.int32)
        ties_wanted = wanted
        equal = tl.zeros_like(wanted)
        if outside > wanted:
            bound = bounds + (request * tl.num_programs(0) + row) * radix.FIELDS
            low = tl.load(bound) ^ -2147483648
            ties_wanted = tl.load(bound + 1)
            equal = tl.load(bound + 2)
            equal = tl.where(equal > ties_wanted, equal, 0)
        low_peak, cuts, ties_wanted = _among_equal(
            scores, unpooled, outside, low, ties_wanted, equal, POOLED, BLOCK
        )
    else:
        low, low_peak, cuts, ties_wanted = cut(scores, unpooled, outside, wanted, POOLED, BLOCK)
    sure = tl.zeros_like(length)
    ties = tl.zeros_like(length)
    kept_below_cap = tl.zeros_like(length)
    for begin in range(0, length, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        scored = key < outside
        score = tl.load(scores + key, mask=scored, other=0.0).to(tl.int32, bitcast=True)
        is_sure = (scored & (score > low)) | ((key >= outside) & (key < length))
        is_tie = scored & (score == low)
        if POOLED:
            among = is_tie & cuts
            peak = tl.load(unpooled + key, mask=among, other=0.0).to(tl.int32, bitcast=True)
            is_sure |= among & (peak > low_peak)
            is_tie &= ~(among & (peak != low_peak))
        # One scan counts both: neither reaches 2 ** 15 within a block.
        packed = is_sure.to(tl.int32) + (is_tie.to(tl.int32) << 16)
        before = tl.cumsum(packed, axis=0) - packed
        ties_before = ties + (before >> 16)
        keep = is_sure | (is_tie & (ties_before < ties_wanted))
        kept_before = sure + (before & 0xFFFF) + tl.minimum(ties_before, ties_wanted)
        in_block = tl.sum(packed)
        sure += in_block & 0xFFFF
        ties += in_block >> 16
        if MOVES:
            # Only keys at or above the cap need the sum, which is complete by then.
            kept_below_cap += tl.sum((keep & (key < cap)).to(tl.int32))
            source = keep & (key >= cap)
            tl.store(kept_or_sources + out + kept_before - kept_below_cap, key, mask=source)
            target = (key < cap) & (key < length) & ~keep
            tl.store(targets + out + key - kept_before, key, mask=target)
        else:
            tl.store(kept_or_sources + out + kept_before, key, mask=keep)
    if MOVES:
        moves = tl.maximum(tl.minimum(cap, length) - kept_below_cap, 0)
        tl.store(num_moves + row * tl.num_programs(1) + request, moves)


def select_kept_reference(
    scores: Tensor,
    num_keys: Tensor,
    windows: Tensor,
    caps: Tensor,
    offsets: Tensor,
    unpooled: Tensor | None = None,
) -> list[Tensor]:
    """`select_kept` in plain torch: per request (R, min(caps[f], num_keys[f])) int64."""
    sizes = (num_keys.tolist(), windows.tolist(), caps.tolist(), offsets.tolist())
    kept = []
    for length, window, cap, first in zip(*sizes, strict=False):
        columns = slice(first, first + length - window)
        peaks = None if unpooled is None else unpooled[:, columns]
        kept.append(dense.kept_indices(scores[:, columns], cap, window, peaks))
    return kept


def select_moves_reference(
    scores: Tensor,
    num_keys: Tensor,
    windows: Tensor,
    caps: Tensor,
    offsets: Tensor,
    unpooled: Tensor | None = None,
) -> list[list[tuple[Tensor, Tensor]]]:
    """`select_moves` in plain torch: per request and row, sources and targets, int64."""
    moves = []
    kept = select_kept_reference(scores, num_keys, windows, caps, offsets, unpooled)
    for cap, rows in zip(caps.tolist(), kept, strict=True):
        slots = torch.arange(min(cap, rows.shape[1]), device=scores.device)
        moves.append([(row[row >= cap], slots[~torch.isin(slots, row)]) for row in rows])
    return moves
