"""Queries of generated tokens that retention waits for (`after=`), kept by CUDA graphs."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.worker.prefill.score_and_move import PrefillBuffers
from vllm_kvx.worker.step import Step


class WaitingQueries:
    """What layers do beside attention in a decode step in which requests wait for more tokens.

    A graph keeps the query of each of its rows, in a slot and place of the windows that it reads at
    fixed addresses. Rows that keep none, padding among them, write to a slot that nobody reads.

    in_graphs: whether such steps of the server replay graphs.
    keeps: whether the graph does that the running step replays, or that is captured.
    spare_slot: the one that nobody reads.
    """

    def __init__(self, memory: PrefillBuffers, max_rows: int) -> None:
        """max_rows: the most that a graph has."""
        self.in_graphs, self.keeps = memory.spare_slot is not None, False
        self._queries, self.spare_slot = memory.all_queries, memory.spare_slot or 0
        self._at = torch.zeros(
            2, max_rows if self.in_graphs else 0, dtype=torch.int64, device=memory.device
        )

    @property
    def at(self) -> tuple[Tensor, Tensor]:
        """(rows,) int64 slots and places of the graphs' rows."""
        slots, places = self._at
        return slots, places

    def beside(
        self, step: Step | None, mode: CUDAGraphMode, num_rows: int, for_capture: bool
    ) -> "WaitingQueries | None":
        """What a graph of `num_rows` rows does beside attention; None if it keeps no query.

        Says whether it keeps any, and writes what it is about to read.

        step: None of a dummy batch. mode: how the batch runs.
        """
        if step is None:
            # What is captured was said before.
            self.keeps = self.keeps and for_capture
        else:
            self.keeps = mode == CUDAGraphMode.FULL and bool(step.chunks)
        if not self.keeps:
            return None
        assert self.in_graphs, "a CUDA graph would replay past a prompt"
        at = np.zeros((2, num_rows), dtype=np.int64)
        at[0] = self.spare_slot
        ends = [] if step is None else np.cumsum(step.counts).tolist()
        for chunk in () if step is None else step.chunks:
            assert not chunk.is_last, "a CUDA graph would replay past the end of a prompt"
            state, end = chunk.state, ends[chunk.batch_index]
            if state.slot is None:  # None of its queries scores.
                continue
            rows = slice(end - (chunk.end - chunk.begin), end)
            window_start = state.settles_at - state.window
            at[0, rows] = state.slot
            at[1, rows] = range(chunk.begin - window_start, chunk.end - window_start)
        self._at[:, :num_rows].copy_(async_tensor_h2d(at, device=self._at.device))
        return self

    def run(self, hook: Any, query: Tensor, paged: PagedKV) -> None:
        """Keeps a layer's queries, (rows, H, D); see ``LayerWork``."""
        slots, places = self._at[:, : query.shape[0]]
        self._queries[:, hook.place].index_put_((slots, places), query)
