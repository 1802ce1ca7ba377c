"""What others have for the operators of retrieval, for benchmarks/ops/retrieval.py to time.

Top-k of torch and of vLLM take rows of one length and one count. Sparse attention of xformers
(Triton, split-K, paged bias) takes whole pages of at least 16 tokens, so its sequences are the
lists of pages of single KV heads, in a cache of its own.
"""

from collections.abc import Callable
from typing import Any

import torch

from vllm_kvx.indexes.base import AnyIndex
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.attend import attend_reference

Operators = dict[str, Callable[[], Any]]
_XFORMERS_CACHE_BYTES = 8 << 30


def top_k(rows: int, length: int, budget: int) -> tuple[Operators, Callable[[], Any]]:
    """Top-k of (rows, length) scores, and what brings the scores to L2 as scoring would."""
    scores = torch.randn(rows, -(-length // 4) * 4, device="cuda")
    lens = torch.full((rows,), length, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, budget, dtype=torch.int32, device="cuda")
    space = torch.zeros(4 << 20, dtype=torch.uint8, device="cuda")
    ops = torch.ops._C
    operators: Operators = {
        "select/torch": lambda: scores.topk(budget, dim=-1),
        "select/vllm persistent_topk": lambda: ops.persistent_topk(
            scores, lens, out, space, budget, length
        ),
        "select/vllm top_k_per_row_decode": lambda: ops.top_k_per_row_decode(
            scores, 1, lens, out, rows, scores.stride(0), scores.stride(1), budget
        ),
    }
    return operators, lambda: scores.mul_(1.0)


def references(
    index: AnyIndex,
    query: torch.Tensor,
    paged: PagedKV,
    sidecar: Any,
    table: torch.Tensor,
    length: int,
    budget: int,
) -> Operators:
    """Our references in torch, which run row by row and cannot be captured.

    Args:
        query: (B, H, D). table: (B, blocks) int32.
    """
    batch, kv_heads, scale = query.shape[0], paged.num_heads, query.shape[-1] ** -0.5
    entries = torch.linspace(0, length - 1, budget, device="cuda").long()
    heads = [PagedKV(paged.keys[:, g : g + 1], paged.values[:, g : g + 1]) for g in range(kv_heads)]
    queries = query.unflatten(1, (kv_heads, -1))

    def score() -> None:
        for r in range(batch):
            index.score_in_torch(query[r], sidecar, table[r], length, "max", scale)

    def attend() -> None:
        for r in range(batch):
            for g, head in enumerate(heads):
                attend_reference(queries[r, g], head, table[r], entries, scale)

    return {"score/torch": score, "attend/torch": attend}


def xformers_attention(query: torch.Tensor, kv_heads: int, budget: int, page: int) -> Operators:
    """Attention of each KV head's queries to `budget` entries in pages from all over a cache.

    Args:
        query: (B, H, D).
        page: tokens, at least 16.

    Raises:
        ImportError: there is no xformers.
    """
    from xformers.ops.fmha import Inputs
    from xformers.ops.fmha.attn_bias import (
        BlockDiagonalPaddedKeysMask,
        PagedBlockDiagonalPaddedKeysMask,
    )
    from xformers.ops.fmha.triton_splitk import FwOp

    class PageOp(FwOp):
        """With tiles that a page is a multiple of."""

        BLOCK_N = min(page, FwOp.BLOCK_N)

    batch, heads, dim = query.shape
    share, sequences = heads // kv_heads, batch * kv_heads
    entry_bytes = dim * query.element_size()
    pages = max(_XFORMERS_CACHE_BYTES // (2 * page * entry_bytes), sequences * budget // page)
    shape = (1, pages * page, 1, 1, dim)
    keys = torch.empty(shape, dtype=query.dtype, device=query.device)
    values = torch.empty_like(keys)
    for part in (*keys.split(1 << 20, dim=1), *values.split(1 << 20, dim=1)):
        part.normal_()
    order = torch.randperm(pages, device=query.device)[: sequences * budget // page]
    bias = BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[1] * sequences,
        kv_padding=budget,
        kv_seqlen=[budget] * sequences,
        device=query.device,
    ).make_paged(order.int().view(sequences, -1), page, PagedBlockDiagonalPaddedKeysMask)
    inputs = Inputs(
        query=query.reshape(1, sequences, 1, share, dim),
        key=keys.expand(-1, -1, -1, share, -1),
        value=values.expand(-1, -1, -1, share, -1),
        attn_bias=bias,
        scale=dim**-0.5,
    )
    name = f"attend/xformers split-K, pages of {page}"
    return {name: lambda: PageOp.apply(inputs, needs_gradient=False)[0]}
