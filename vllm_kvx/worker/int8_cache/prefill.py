"""Attention of prompts over entries in 8 bits: what they stand for is written out, and then read.

FlashAttention reads the model's own dtype alone, and reads it fast. A chunk's own entries are
read as they are stored, too, so that it does not matter where a prompt is cut.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from vllm_kvx.equations.softmax import capped
from vllm_kvx.ops.int8.undo import undo
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.worker.int8_cache.pieces import Chunk


class Softmax(NamedTuple):
    """How a layer attends: factor of the products, and what bounds them (0 for nothing)."""

    scale: float
    soft_cap: float


class Rows(NamedTuple):
    """What requests ask with, one request's rows behind another's.

    query: (m, H, D). bounds: (requests + 1,) int32 on the device, 0 and where each one's rows end.
    longest: the most rows of one.
    """

    query: Tensor
    bounds: Tensor
    longest: int


class Entries(NamedTuple):
    """What requests attend to, laid out like `Rows`; keys, values: (n, G, D)."""

    keys: Tensor
    values: Tensor
    bounds: Tensor
    longest: int


def attend_undone(
    query: Tensor,
    paged: PagedKV,
    block_table: Tensor,
    chunk: Chunk,
    bounds: Tensor,
    out: Tensor,
    softmax: Softmax,
    version: int | None,
) -> None:
    """Attention of a chunk's rows to all entries of their requests up to each row's own.

    Args:
        query, out: (N, H, D), of which the rows of `chunk` are read and written.
        block_table: (R, blocks) int32. bounds: int32 on the device: `Plan.bounds`.
        version: of FlashAttention; None has torch attend.
    """
    query, out = query[chunk.begin : chunk.stop], out[chunk.begin : chunk.stop]
    most = max(piece.total for piece in chunk.pieces)
    size = most, paged.num_heads, paged.head_dim
    keys, values = (torch.empty(size, dtype=query.dtype, device=query.device) for _ in range(2))
    tables = block_table[chunk.request : chunk.request + chunk.num_requests]
    before: tuple[Tensor, Tensor] | None = None
    for piece in chunk.pieces:
        is_last, count = piece is chunk.pieces[-1], piece.total
        of_rows, of_entries = (bounds[at] for at in chunk.bounds_at(piece))
        undo(paged, tables, piece.first, of_entries, count, keys, values)
        part = out if is_last and before is None else torch.empty_like(out)
        rows = Rows(query, of_rows, chunk.longest)
        entries = Entries(keys[:count], values[:count], of_entries, piece.longest)
        lse = _attend(rows, entries, is_last, part, softmax, version)
        if before is None:
            before = part, lse
            continue
        to, of_both = out if is_last else torch.empty_like(out), torch.empty_like(lse)
        merge_attn_states(to, *before, part, lse, of_both)
        before = to, of_both


def scratch_bytes(
    entries: int, rows: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, cuts: bool
) -> int:
    """Bytes that ``attend_undone`` takes for a moment, at most.

    entries: undone at once. rows: of a step. cuts: whether a context may have several pieces, whose
        outputs are kept beside one another.
    """
    undone = 2 * entries * kv_heads * head_dim * itemsize
    outputs = 3 * rows * heads * (head_dim * itemsize + 4) if cuts else 0
    return undone + outputs


def _attend(
    rows: Rows,
    entries: Entries,
    is_causal: bool,
    out: Tensor,
    softmax: Softmax,
    version: int | None,
) -> Tensor:
    """Writes each request's attention to its own entries to `out` (m, H, D).

    is_causal: a request's last row sees all of its entries, the one before it one less, and so on.
    Returns: (H, m) float32, the logarithm of each softmax's sum.
    """
    if version is None:
        return _attend_in_torch(rows, entries, is_causal, out, softmax)
    from vllm.v1.attention.backends import fa_utils

    _, lse = fa_utils.flash_attn_varlen_func(  # No CPU's build has it.
        q=rows.query,
        k=entries.keys,
        v=entries.values,
        out=out,
        cu_seqlens_q=rows.bounds,
        max_seqlen_q=rows.longest,
        cu_seqlens_k=entries.bounds,
        max_seqlen_k=entries.longest,
        softmax_scale=softmax.scale,
        causal=is_causal,
        softcap=softmax.soft_cap,
        return_softmax_lse=True,
        fa_version=version,
    )
    return lse


def _attend_in_torch(
    rows: Rows, entries: Entries, is_causal: bool, out: Tensor, softmax: Softmax
) -> Tensor:
    """``_attend`` in plain torch, a request after another."""
    lses = []
    of_each = zip(pairwise(rows.bounds.tolist()), pairwise(entries.bounds.tolist()), strict=True)
    for (begin, stop), (first, end) in of_each:
        some = entries.keys[first:end], entries.values[first:end]
        own = rows.query[begin:stop], *some, is_causal, out[begin:stop], softmax
        lses.append(_attend_to_one(*own))
    return torch.cat(lses, dim=1)


def _attend_to_one(
    query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, out: Tensor, softmax: Softmax
) -> Tensor:
    """``_attend_in_torch`` of one request."""
    rows, entries = query.shape[0], keys.shape[0]
    share = query.shape[1] // keys.shape[1]
    of_heads = (each.float().transpose(0, 1).repeat_interleave(share, 0) for each in (keys, values))
    keys, values = of_heads
    logits = query.float().transpose(0, 1) @ keys.transpose(1, 2) * softmax.scale
    logits = capped(logits, softmax.soft_cap or None)
    if is_causal:
        seen = torch.ones(rows, entries, dtype=torch.bool, device=out.device)
        logits = logits.masked_fill(~seen.tril(entries - rows), float("-inf"))
    out.copy_((logits.softmax(dim=-1) @ values).transpose(0, 1))
    return logits.logsumexp(dim=-1)
