"""Retrieval's CUDA operators, where they have been built: `vllm-kvx build-ops`.

R rows are the tokens of a step that retrieve; their tensors keep their addresses, for CUDA graphs.
A row's *units* are what is selected: its entries for FIER, its pages for Quest. The newest group or
page is always selected: its scores are infinite.

Every operator takes
    tokens: (R,) int32, the row's index in `q` and `out`;
    requests: (R,) int32, its row of the block table;
    lens: (R,) int32, entries it sees, its own included; 0 if there is nothing to do;
    block_table: (B, max_blocks) int32;
and
    offsets: (R,) int64, where the row's units begin in the scores.
No operator waits for the device or allocates, and only the device reads lengths. H query heads
share G KV heads, up to 16 each; head dimension D is 64, 128 or 256.
"""

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_kvx.ops import library

HISTOGRAM_BINS = 2048
REDUCTIONS = {"max": 0, "sum": 1}
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
MAX_SHARE = 16
# Of one launch that does it all: the largest share, and int32 that it keeps per row and KV head, of
# which the last ones are a list that is not zero between launches.
FUSED_MAX_SHARE = 8
FUSED_LIST = 2 * HISTOGRAM_BINS + 64
FUSED_STATE = FUSED_LIST + 2 * 4096
# Up to so many rows selection and attention may start before the operator before them has ended, on
# Hopper and later (programmatic dependent launch). With one row, where a layer is mostly their
# starting, it takes 1 to 6% less. With several they wait where others could run, or not: six of
# 130,000 entries take 1% less, two and 16 of them 9 to 12% more
# (benchmarks/results/ops/h200-retrieval-step.json, h200-retrieval-variants.json).
OVERLAP_ROWS = 1


def why_not() -> str:
    """Why the operators cannot run in this process, on its current GPU; empty if they can.

    It loads them.
    """
    if not torch.cuda.is_available():
        return "there is no GPU"
    return _why_not_on(torch.cuda.current_device())


def why_not_for(dtype: torch.dtype, head_dim: int, share: int) -> str:
    """Why the operators do not take such queries, empty if they do.

    share: query heads per KV head.
    """
    if dtype not in DTYPES:
        return f"CUDA ops want float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"CUDA ops want head dimensions of {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    if share > MAX_SHARE:
        return f"CUDA ops want at most {MAX_SHARE} query heads per KV head, not {share}"
    return ""


def not_built() -> str:
    """What to do if no library is built from this package's sources, else empty; needs no GPU."""
    return library.missing()


def loaded() -> Path | None:
    """The library that this process has loaded, if any."""
    return _loaded[0].library.path if _loaded else None


class _Loaded(NamedTuple):
    library: library.Library
    handle: ctypes.CDLL


# At most one: a second one, or a new file of the same name, would register the same operators.
_loaded: list[_Loaded] = []


def _why_not_on(device: int) -> str:
    if not _loaded and (missing := not_built()):
        return missing
    capability = torch.cuda.get_device_capability(device)
    there = [each.library for each in _loaded] or library.found()
    fitting = [each for each in there if each.runs_on(capability)]
    if not fitting:
        return library.not_for(there, capability)
    path = fitting[0].path
    if not _loaded:
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            return f"{path} cannot be loaded: {error.__cause__ or error}"
        _loaded.append(_Loaded(fitting[0], ctypes.CDLL(str(path))))
    probe = _loaded[0].handle.kvx_device_error
    probe.restype = ctypes.c_char_p
    refusal = probe(device)
    return f"{path} does not run on this GPU: {refusal.decode()}" if refusal is not None else ""


def score(
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    block_table: Tensor,
    tokens: Tensor,
    requests: Tensor,
    lens: Tensor,
    offsets: Tensor,
    scores: Tensor,
    histogram: Tensor,
    group: int,
    reduction: int,
    programs: int,
) -> None:
    """Scores every entry by its 1-bit key, one score per KV head (FIER Algorithm 1).

    Args:
        q: (N, H, D) float16 or bfloat16.
        codes: (blocks, G, block_size, D / 32) int32, scales: (blocks, G, block_size / group, 2, D)
            float16: the sidecar, any strides of blocks and heads.
        scores: (G, capacity) float32, written at [g, offsets[r] + entry].
        histogram: (R, G, 2048) int32, zero; gets how many scores there are by the top 11 bits.
        group: tokens that share scales: 32, 64, 128 or 256, a divisor of the block size.
        reduction: over query heads that share a KV head: 0 maximum, 1 sum.
        programs: CTAs that the GPU runs at once. Of them, or of twice as many, a row has its share
            by the entries of all rows, and one for each head at least. One row alone has half.
    """
    torch.ops.vllm_kvx.kvx_score(
        q,
        codes,
        scales,
        block_table,
        tokens,
        requests,
        lens,
        offsets,
        scores,
        histogram,
        group,
        reduction,
        programs,
    )


def score_pages(
    q: Tensor,
    scales: Tensor,
    block_table: Tensor,
    tokens: Tensor,
    requests: Tensor,
    lens: Tensor,
    offsets: Tensor,
    scores: Tensor,
    histogram: Tensor,
    page: int,
    reduction: int,
    splits: int,
) -> None:
    """Scores every page by the largest product that its keys allow, one score per KV head (Quest).

    Args:
        page: tokens of a page, a divisor of the block size.
        splits: CTAs per row and KV head.
        scores, offsets: in pages. All others are those of ``score``.
    """
    torch.ops.vllm_kvx.kvx_score_pages(
        q,
        scales,
        block_table,
        tokens,
        requests,
        lens,
        offsets,
        scores,
        histogram,
        page,
        reduction,
        splits,
    )


def select(
    scores: Tensor,
    histogram: Tensor,
    lens: Tensor,
    budgets: Tensor,
    offsets: Tensor,
    indices: Tensor,
    counts: Tensor,
    unit_tokens: int,
    overlap: bool = False,
    ctas: int = 0,
) -> None:
    """Selects each row's units of highest score, of equal ones those of lower index.

    Args:
        scores, histogram: as the score operators left them; the histogram is zero afterwards.
        budgets: (R,) int32, units to select, at most K; all of them if there are no more.
        indices: (R, G, K) int32, written in ascending order.
        counts: (R, G) int32, how many were; 0 for rows with nothing to do.
        unit_tokens: tokens of a unit.
        overlap: see OVERLAP_ROWS; only behind a score operator on the same stream.
        ctas: that share a row and KV head, a cluster of 1, 2, 4 or 8; 0 chooses by how many of
            these there are. Before Hopper always 1.
    """
    torch.ops.vllm_kvx.kvx_select(
        scores, histogram, lens, budgets, offsets, indices, counts, unit_tokens, overlap, ctas
    )


def fused(
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    tokens: Tensor,
    requests: Tensor,
    lens: Tensor,
    budgets: Tensor,
    state: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    group: int,
    scale: float,
    key_scale: float,
    value_scale: float,
    max_units: int,
    splits: int,
    programs: int,
    sinks: Tensor | None = None,
) -> None:
    """What ``score``, ``select`` and ``attend`` do of single tokens, in one launch.

    It chooses the same tokens. Scores are reduced by their maximum; keys have the dtype of q, and
    at most 8 query heads share a KV head. For Hopper and later.

    Args:
        block_table: of at most ``fused_longest`` entries a row.
        state: (R G, FUSED_STATE) int32, zero before the first launch; all but what it has listed
            is zero again afterwards.
        max_units: most that a row may select.
        splits: CTAs per row and KV head at most, up to 128.
        programs: multiprocessors of the GPU, of which each runs a CTA. A row and KV head with
            something to do has one at least; the others are shared by entries.
        All others are those of the three operators.
    """
    torch.ops.vllm_kvx.kvx_fused(
        q,
        codes,
        scales,
        keys,
        values,
        block_table,
        tokens,
        requests,
        lens,
        budgets,
        state,
        partial_out,
        partial_lse,
        out,
        group,
        scale,
        key_scale,
        value_scale,
        max_units,
        splits,
        programs,
        sinks,
    )


def fused_longest(
    device: torch.device,
    head_dim: int,
    share: int,
    kv_heads: int,
    num_rows: int,
    splits: int,
    programs: int,
) -> int:
    """Entries that rows of ``fused`` may have at most, for their scores to fit in shared memory.

    share: query heads per KV head. splits, programs: as ``fused`` takes them. The operators are
    loaded, see ``why_not``.
    """
    ask = _loaded[0].handle.kvx_fused_longest
    ask.argtypes, ask.restype = [ctypes.c_int] * 7, ctypes.c_int64
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(ask(index, head_dim, share, kv_heads, num_rows, splits, programs))


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    tokens: Tensor,
    requests: Tensor,
    lens: Tensor,
    indices: Tensor,
    counts: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    tickets: Tensor,
    out: Tensor,
    scale: float,
    key_scale: float,
    value_scale: float,
    unit_tokens: int,
    splits: int,
    programs: int,
    overlap: bool = False,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Attention over the selected units only, exact.

    Args:
        q: (N, H, D) float16 or bfloat16.
        keys, values: (blocks, G, block_size, D) of the same strides, dtype of q, float8_e4m3fn,
            float8_e5m2 or int8.
        indices, counts: as ``select`` left them, or one list for all rows and heads, expanded to
            (R, G, K); entries past a row's length do not count.
        partial_out: (R, H, splits, D) float32, partial_lse: (R, H, splits) float32: scratch.
        tickets: (R, G) int32, zero, and again afterwards.
        out: like q; rows `tokens` are written, but for rows with nothing to do.
        scale: of the products. key_scale, value_scale: what stored numbers are multiplied by.
        unit_tokens: tokens of a unit.
        splits: CTAs per row and KV head, at most 128. programs: of all rows that have something to
            do, at most; a row and KV head has one at least.
        overlap: see OVERLAP_ROWS; only behind ``select`` on the same stream.
        soft_cap: of the logits, above 0. sinks: (H,), float32 or the dtype of q. None without.
        key_scales, value_scales: (blocks, G, block_size) float32 of the same strides, what each
            entry's numbers are multiplied by: of int8, and of no other dtype. Then keys and values
            lie side by side, and so do their scales, as in ``PagedKV.of_int8``.
    """
    torch.ops.vllm_kvx.kvx_attend(
        q,
        keys,
        values,
        block_table,
        tokens,
        requests,
        lens,
        indices,
        counts,
        partial_out,
        partial_lse,
        tickets,
        out,
        scale,
        key_scale,
        value_scale,
        unit_tokens,
        splits,
        programs,
        overlap,
        soft_cap or 0.0,
        sinks,
        key_scales,
        value_scales,
    )
