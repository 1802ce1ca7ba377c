"""FIER's layer in one CUDA launch, in the place of three, where that is faster."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval import cuda as cuda_ops
from vllm_kvx.ops.retrieval.rows import RetrievalRows

# Where it has been measured, and was faster than three launches: on Hopper, up to so many rows, and
# so many pairs of a row and a KV head, as each gets its part of the multiprocessors
# (benchmarks/results/ops/h200-retrieval-step-one-launch.json, with 8 KV heads; with 4
# h200-retrieval-step-one-launch-of-2.json). For more rows its first version
# took two to four times as long as three (h200-retrieval-one-launch.json).
CAPABILITY = (9, 0)
MAX_ROWS, MAX_PAIRS = 4, 32
# CTAs of a row and KV head whose parts of the result one of them merges.
MAX_SPLITS = 128


@dataclass(frozen=True)
class OneLaunch:
    """What one launch needs beside the scratch of the three, and where it may be taken.

    No two launches may run at a time, as they share `state`; layers run one after the other, in
    one stream, as vLLM's microbatches are refused.

    Attributes:
        state: (R G, FUSED_STATE) int32, see ``cuda.fused``.
        multiprocessors: of the GPU. splits: CTAs of a row and KV head at most.
        longest: entries that rows may have at most, for their scores to fit in shared memory, by
            the number of rows, from one on.
    """

    state: Tensor
    multiprocessors: int
    splits: int
    longest: tuple[int, ...]

    @classmethod
    def of(
        cls, heads: int, kv_heads: int, head_dim: int, max_rows: int, device: torch.device
    ) -> "OneLaunch | None":
        """For at most `max_rows` rows; None where it is not known to be faster.

        heads, kv_heads: of a layer. The CUDA operators take such queries.
        """
        rows = min(max_rows, MAX_ROWS, MAX_PAIRS // kv_heads)
        if rows < 1 or heads // kv_heads > cuda_ops.FUSED_MAX_SHARE:
            return None
        if torch.cuda.get_device_capability(device) != CAPABILITY:
            return None
        count = torch.cuda.get_device_properties(device).multi_processor_count
        splits = min(count // kv_heads, MAX_SPLITS)
        shape = (head_dim, heads // kv_heads, kv_heads)
        longest = tuple(
            cuda_ops.fused_longest(device, *shape, num_rows, splits, count)
            for num_rows in range(1, rows + 1)
        )
        size = (rows * kv_heads, cuda_ops.FUSED_STATE)
        return cls(torch.zeros(size, dtype=torch.int32, device=device), count, splits, longest)

    @property
    def counters(self) -> Tensor:
        """The part of `state` that is zero between launches."""
        return self.state[:, : cuda_ops.FUSED_LIST]

    def takes(
        self,
        query: Tensor,
        paged: PagedKV,
        block_table: Tensor,
        num_rows: int,
        soft_cap: float | None,
    ) -> bool:
        """Whether it does a layer of so many rows, whatever these are.

        All that it goes by a CUDA graph fixes: rows may have as many entries as the block table has
        room for, of which vLLM makes it as wide as the longest context that the server takes.
        """
        return (
            0 < num_rows <= len(self.longest)
            and block_table.shape[1] * paged.block_size <= self.longest[num_rows - 1]
            and paged.keys.dtype == query.dtype
            and soft_cap is None
        )

    def run(
        self,
        query: Tensor,
        paged: PagedKV,
        sidecar: Any,
        block_table: Tensor,
        rows: RetrievalRows,
        parts: tuple[Tensor, Tensor],
        out: Tensor,
        scale: float,
        key_scale: float,
        value_scale: float,
        max_units: int,
        sinks: Tensor | None,
    ) -> None:
        """See ``retrieve``; what was chosen is kept nowhere.

        sidecar: of 1-bit keys. parts: see ``Scratch.parts``, of `splits`. max_units: most that a
        row may select.
        """
        cuda_ops.fused(
            query,
            sidecar.codes,
            sidecar.scales,
            paged.keys,
            paged.values,
            block_table,
            rows.tokens,
            rows.requests,
            rows.lens,
            rows.budgets,
            self.state,
            *parts,
            out,
            sidecar.shape.group,
            scale,
            key_scale,
            value_scale,
            max_units,
            self.splits,
            self.multiprocessors,
            sinks,
        )
