"""The best units of every row and KV head, exactly, in ascending order."""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.ops.retrieval_rows import RetrievalRows

_BLOCK = 4096


def top_units(
    scores: Tensor, rows: RetrievalRows, indices: Tensor, counts: Tensor, *, unit: int
) -> None:
    """Writes the `budgets` best units of each row, ascending; of equal scores the lower index.

    Unlike vLLM's top-k ops each row has its own count and its scores begin where they may.

    Args:
        scores: (G, capacity) float32, no NaN; each row's at its offset.
        indices: (R, G, K) int32; counts: (R, G) int32, 0 where the row does not retrieve.
        unit: tokens per unit.
    """
    _select_kernel[(scores.shape[0], rows.lens.shape[0])](
        scores,
        rows.lens,
        rows.budgets,
        rows.offsets,
        indices,
        counts,
        scores.stride(0),
        indices.shape[2],
        UNIT=unit,
        BLOCK=_BLOCK,
        num_warps=16,
    )


@triton.jit
def _sort_key(score):
    """int32 keys in the order of the scores, which sort as unsigned numbers."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # Negative zero is zero.
    return tl.where(bits < 0, ~bits, bits ^ -2147483648)


@triton.jit
def _select_kernel(
    scores,
    row_lens,
    row_budgets,
    row_offsets,
    indices,
    counts,
    score_stride,
    max_units,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    place = row * tl.num_programs(0) + head
    length = tl.load(row_lens + row)
    if length == 0:
        tl.store(counts + place, 0)
        return
    num_units = tl.cdiv(length, UNIT)
    budget = tl.load(row_budgets + row)
    out = indices + place.to(tl.int64) * max_units
    at = tl.arange(0, BLOCK)
    if num_units <= budget:
        for start in range(0, num_units, BLOCK):
            tl.store(out + start + at, start + at, mask=start + at < num_units)
        tl.store(counts + place, num_units)
        return
    tl.store(counts + place, budget)

    mine = scores + head.to(tl.int64) * score_stride + tl.load(row_offsets + row)
    # Byte by byte from the top: how the best `budget` keys begin, and how many of those that
    # begin so are among them.
    bins = tl.arange(0, 512)
    prefix = tl.zeros((), tl.int32)
    wanted = budget
    for digit in tl.static_range(4):
        histogram = tl.zeros((512,), tl.int32)
        for start in range(0, num_units, BLOCK):
            inside = start + at < num_units
            key = _sort_key(tl.load(mine + start + at, mask=inside, other=0.0))
            if digit > 0:
                inside = inside & ((key >> (32 - 8 * digit)) == (prefix >> (32 - 8 * digit)))
            # The bin that nobody counts takes the rest.
            value = tl.where(inside, (key >> (24 - 8 * digit)) & 255, 511)
            histogram += tl.histogram(value, 512)
        histogram = tl.where(bins < 256, histogram, 0)
        total = tl.sum(histogram, axis=0)
        from_top = total - tl.cumsum(histogram, axis=0) + histogram
        chosen = tl.max(tl.where((bins < 256) & (from_top >= wanted), bins, 0), axis=0)
        here = tl.sum(tl.where(bins == chosen, histogram, 0), axis=0)
        above = tl.sum(tl.where(bins == chosen, from_top, 0), axis=0) - here
        wanted -= above
        prefix = prefix | (chosen << (24 - 8 * digit))

    threshold = prefix ^ -2147483648
    written = tl.zeros((), tl.int32)
    equal_seen = tl.zeros((), tl.int32)
    for start in range(0, num_units, BLOCK):
        inside = start + at < num_units
        key = _sort_key(tl.load(mine + start + at, mask=inside, other=0.0)) ^ -2147483648
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
