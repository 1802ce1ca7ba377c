"""The one cutter of batches: some requests of a step, and some rows of each, as a batch."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.utils import AttentionGroup


@dataclass(frozen=True)
class PassBatch:
    """The rows of one pass, as attention backends take them.

    Attributes:
        requests: (P,) int64 places of its requests in the step's batch, ascending; each has a row.
            One whose rows are in two places of its sequence comes twice.
        counts: (P,) int32 rows of each.
        positions: (N,) int64 token positions.
        block_tables: (P, B) int32 by KV group. slot_mappings: (G, N) int64.
    """

    requests: np.ndarray
    counts: np.ndarray
    positions: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mappings: Tensor

    def of(
        self,
        batch: InputBatch,
        seq_lens: Tensor,
        bounds: Tensor,
        is_prefilling: np.ndarray | None = None,
    ) -> InputBatch:
        """`batch`, the step's, cut down to these rows.

        Args:
            seq_lens: (P,) int32 stored lengths. bounds: the same or more, on the host.
            is_prefilling: (P,) bool; None: as in `batch`.
        """
        requests = self.requests
        starts = np.zeros(len(requests) + 1, dtype=np.int32)
        np.cumsum(self.counts, out=starts[1:])
        num_rows = int(starts[-1])
        if is_prefilling is None:
            is_prefilling = batch.is_prefilling_np[requests]
        return replace(
            batch,
            num_reqs=len(requests),
            num_reqs_after_padding=len(requests),
            idx_mapping_np=batch.idx_mapping_np[requests],
            num_scheduled_tokens=self.counts,
            num_tokens=num_rows,
            num_tokens_after_padding=num_rows,
            query_start_loc=async_tensor_h2d(starts, device=self.positions.device),
            query_start_loc_np=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=bounds,
            is_prefilling_np=is_prefilling,
            positions=self.positions,
        )


@contextlib.contextmanager
def unplanned(groups: Iterable[Iterable[AttentionGroup]]) -> Iterator[None]:
    """Inside, what attention builds for the groups of each leaves a batch's plan to its kernels.

    FlashAttention 3 plans ahead into a buffer for as many sequences as requests may run, or as a
    CUDA graph takes. A pass in which prompts come twice may have more.
    """
    builders: list[Any] = [b for each in groups for group in each for b in group.metadata_builders]
    planning = [builder for builder in builders if getattr(builder, "aot_schedule", False)]
    for builder in planning:
        builder.aot_schedule = False
    try:
        yield
    finally:
        for builder in planning:
            builder.aot_schedule = True


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """(n,) int64 on the device, without waiting for it."""
    return async_tensor_h2d(values.astype(np.int64, copy=False), device=device)
