"""Attention of rows that decode to whole contexts, by the operator that attends to chosen entries.

vLLM's Triton kernel takes longer over 8-bit entries (docs/notebook/int8-cache.md). All of a row's
entries are chosen here, in order; all that is read lies at fixed addresses, for CUDA graphs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.retrieve import Scratch, steps
from vllm_kvx.ops.retrieval.rows import RetrievalRows

# Entries that are chosen together. What the last ones have beyond a context is passed over.
UNIT = 128


def count_units(lens: Tensor, counts: Tensor) -> None:
    """Writes to counts (>= R, G) int32 how many units rows of lens (R,) int32 entries have."""
    units = (lens + (UNIT - 1)).div_(UNIT, rounding_mode="floor")
    counts[: len(lens)].copy_(units[:, None].expand(-1, counts.shape[1]))


class Whole:
    """Attends for one row of each request."""

    def __init__(self, scratch: Scratch, max_rows: int, max_model_len: int) -> None:
        """scratch: of the server's retrieval, for as many rows."""
        device, heads = scratch.counts.device, scratch.counts.shape[1]
        every = torch.arange(cdiv(max_model_len, UNIT), dtype=torch.int32, device=device)
        every = every.expand(max_rows, heads, -1).contiguous()
        self._scratch = replace(scratch.that_chooses, indices=every, unit=UNIT)
        # By the address of the counts that are read.
        self._with_counts: dict[int, Scratch] = {}
        self._order = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._nothing = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def attend(
        self,
        query: Tensor,
        paged: PagedKV,
        block_table: Tensor,
        lens: Tensor,
        counts: Tensor,
        out: Tensor,
        scale: float,
        soft_cap: float | None,
    ) -> None:
        """Writes the first R rows of out, (N, H, D) as query: row r is of request r.

        block_table: (R, blocks) int32. lens: (R,) int32 entries; rows of none stay as they are.
        counts: see `count_units`, at a fixed address.
        """
        scratch = self._with_counts.get(counts.data_ptr())
        if scratch is None:
            scratch = replace(self._scratch, counts=counts)
            self._with_counts[counts.data_ptr()] = scratch
        size = len(lens)
        order = self._order[:size]
        rows = RetrievalRows(order, order, lens, order, self._nothing[:size])
        ops = steps(
            query,
            paged,
            None,
            block_table,
            rows,
            scratch,
            out,
            scale=scale,
            key_scale=1.0,
            value_scale=1.0,
            soft_cap=soft_cap,
            chosen=True,
        )
        ops["attend"]()


def read_by_ops(layers: Sequence[Any], scratch: Scratch, config: VllmConfig) -> None:
    """Has those of vLLM's attention `layers` read by operators that have our own backend.

    Not in torch, which a CPU has: there all rows attend to undone entries.
    """
    ours = [layer for layer in layers if hasattr(layer.impl, "sidecar_bytes")]
    if not ours or scratch.backends.attend == "torch":
        return
    limits = config.scheduler_config, config.model_config
    whole = Whole(scratch, limits[0].max_num_seqs, limits[1].max_model_len)
    for layer in ours:
        layer.impl.whole = whole
