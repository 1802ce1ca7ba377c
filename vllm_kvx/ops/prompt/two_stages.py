"""A choice in two stages as one score for each key, so that `select` makes it in one: CriticalKV's.

The first half of a budget goes to the keys with the highest attention. These get an infinite score.
The rest goes by the other keys' products of attention and value norm, which are finite. The batch
is ragged as in `saliency`, a row of scores is one KV head, or all of them together.
"""

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from vllm_kvx.equations import saliency as dense
from vllm_kvx.ops.prompt.select import cut

# What is added to a weight of attention, the mean over heads and window, before the product: so
# that values tell keys apart that get next to none. It is kvpress's default.
EPSILON = 1e-4
_LARGEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
# Scores that the program of one row and request reads at a time.
_BLOCK = 8192


def two_stage_scores(
    attention: Tensor,
    unpooled: Tensor | None,
    norms: Tensor,
    num_keys: Tensor,
    windows: Tensor,
    caps: Tensor,
    offsets: Tensor,
    group: int | None,
    block: int = _BLOCK,
) -> Tensor:
    """Scores by which `select` keeps the keys of both stages.

    Of the `caps[f] - windows[f]` keys outside the window half, rounded down, are chosen by
    attention. Equal ones are told apart as in `select`.

    Args:
        attention: (G, total_keys) float32, at least 0: sums over the window and over the query
            heads of each KV head. Columns of window keys are not read.
        unpooled: (G, total_keys) float32, what decides among equal attention; None: the index.
        norms: (G, total_keys) float32, at least 0; without a group the products themselves, for
            rows that are sums over KV heads. All three have unit stride along a row.
        num_keys, windows, caps, offsets: as in `select_kept`.
        group: query heads of each KV head; None where `norms` are products.
        block: scores read at a time, a power of two, at most 16384.

    Returns:
        (G, total_keys) float32, at least 0. Columns of window keys hold 0; those from offsets[F] on
        are not written.
    """
    scores = torch.empty_like(attention)
    if not (num_keys.shape[0] and scores.numel()):
        return scores
    _two_stages_kernel[(scores.shape[0], num_keys.shape[0])](
        attention,
        attention.stride(0),
        unpooled,
        0 if unpooled is None else unpooled.stride(0),
        norms,
        norms.stride(0),
        num_keys,
        windows,
        caps,
        offsets,
        scores,
        scores.stride(0),
        EPSILON * (group or 0),
        POOLED=unpooled is not None,
        MULTIPLIED=group is None,
        BLOCK=block,
        num_warps=16 if block >= 4096 else 4,
    )
    return scores


@triton.jit(
    do_not_specialize=[
        "attention_stride",
        "unpooled_stride",
        "norms_stride",
        "num_keys",
        "windows",
        "caps",
        "offsets",
        "scores_stride",
        "epsilon",
    ],
)
def _two_stages_kernel(
    attention,
    attention_stride,
    unpooled,
    unpooled_stride,
    norms,
    norms_stride,
    num_keys,
    windows,
    caps,
    offsets,
    scores,
    scores_stride,
    epsilon,
    POOLED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1)
    length = tl.load(num_keys + request)
    window = tl.load(windows + request)
    outside = length - window
    wanted = (tl.minimum(tl.load(caps + request), length) - window) // 2
    offset = tl.load(offsets + request)
    attention += row * attention_stride + offset
    norms += row * norms_stride + offset
    scores += row * scores_stride + offset
    if POOLED:
        unpooled += row * unpooled_stride + offset
    low, low_peak, cuts, ties_wanted = cut(attention, unpooled, outside, wanted, POOLED, BLOCK)
    added = epsilon * window.to(tl.float32)
    ties = tl.zeros_like(length)
    for begin in range(0, length, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        scored = key < outside
        weight = tl.load(attention + key, mask=scored, other=0.0)
        bits = weight.to(tl.int32, bitcast=True)
        first = scored & (bits > low)
        is_tie = scored & (bits == low)
        if POOLED:
            among = is_tie & cuts
            peak = tl.load(unpooled + key, mask=among, other=0.0).to(tl.int32, bitcast=True)
            first |= among & (peak > low_peak)
            is_tie &= ~(among & (peak != low_peak))
        count = is_tie.to(tl.int32)
        first |= is_tie & (ties + tl.cumsum(count, axis=0) - count < ties_wanted)
        ties += tl.sum(count)
        product = tl.load(norms + key, mask=scored, other=0.0)
        if not MULTIPLIED:
            product = (weight + added) * product
        # What overflows, and what is no number, ranks below the first stage and above the rest.
        product = tl.where(product <= _LARGEST, product, _LARGEST)
        score = tl.where(first, float("inf"), tl.where(scored, product, 0.0))
        tl.store(scores + key, score, mask=key < length)


def two_stage_scores_reference(
    attention: Tensor,
    unpooled: Tensor | None,
    norms: Tensor,
    num_keys: Tensor,
    windows: Tensor,
    caps: Tensor,
    offsets: Tensor,
    group: int | None,
) -> Tensor:
    """`two_stage_scores` in plain torch, one request after the other; (G, offsets[F])."""
    scores = attention.new_zeros(attention.shape[0], int(offsets[-1]))
    sizes = (num_keys.tolist(), windows.tolist(), caps.tolist(), offsets.tolist())
    for length, window, cap, first in zip(*sizes, strict=False):
        columns = slice(first, first + length - window)
        weights = attention[:, columns]
        peaks = None if unpooled is None else unpooled[:, columns]
        half = (min(cap, length) - window) // 2
        product = norms[:, columns]
        if group is not None:
            product = (weights + EPSILON * group * window) * product
        product = product.nan_to_num(nan=_LARGEST.value, posinf=_LARGEST.value)
        best = dense.kept_indices(weights, half, 0, peaks)
        scores[:, columns] = product.scatter(1, best, float("inf"))
    return scores
