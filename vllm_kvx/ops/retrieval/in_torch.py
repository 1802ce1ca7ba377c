"""Retrieval in one layer in plain torch, for CPUs."""

from typing import Any

import torch
from torch import Tensor

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.attend import attend_reference
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.ops.retrieval.scorer import Scorer
from vllm_kvx.ops.retrieval.topk import top_units_reference


def retrieve_in_torch(
    scorer: Scorer[Any],
    reduction: str,
    unit: int,
    indices: Tensor,
    counts: Tensor,
    query: Tensor,
    paged: PagedKV,
    sidecar: Any,
    block_table: Tensor,
    rows: RetrievalRows,
    out: Tensor,
    scale: float,
    key_scale: float,
    value_scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    chosen: bool,
) -> None:
    """See ``retrieve``, and ``Scratch`` for what comes before the query."""
    share = query.shape[1] // paged.num_heads
    columns = (rows.tokens, rows.requests, rows.lens, rows.budgets)
    for r, (token, request, length, budget) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        table = block_table[request]
        if not chosen:
            counts[r] = 0
        if not length:
            continue
        if not chosen:
            scores = scorer.score_in_torch(
                query[token], sidecar, table, length, reduction, scale * key_scale
            )
            for g, of_head in enumerate(scores):
                units = top_units_reference(of_head, budget)
                counts[r, g] = len(units)
                indices[r, g, : len(units)] = units.int()
        for g in range(paged.num_heads):
            units = indices[r, g, : int(counts[r, g])].long()
            entries = (units[:, None] * unit + torch.arange(unit, device=units.device)).flatten()
            heads = slice(g * share, (g + 1) * share)
            out[token, heads] = attend_reference(
                query[token, heads],
                paged.of_head(g),
                table,
                entries[entries < length],
                scale,
                key_scale,
                value_scale,
                soft_cap,
                None if sinks is None else sinks[heads],
            ).to(out.dtype)
