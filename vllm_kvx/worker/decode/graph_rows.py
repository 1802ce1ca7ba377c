"""What the CUDA graphs of a step's retrieval read: its rows, and what they write, at fixed places.

A graph has a row for each token of its step: one of each request, or several where tokens are
drafted. Rows that a step has not, and rows that read all entries, see none.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvx.ops.retrieval.rows import NUM_FIELDS, RetrievalRows, fill
from vllm_kvx.policy.layout import RetrievalLayout
from vllm_kvx.worker.decode.step import RetrievalStep


def most_rows(config: VllmConfig) -> int:
    """The most rows of a decode step that replays a graph; at least one for each request."""
    most = config.scheduler_config.max_num_seqs
    largest = config.compilation_config.max_cudagraph_capture_size or 0
    return max(most, min(most * (1 + config.num_speculative_tokens), largest))


class GraphRows:
    """Rows of graphs, and the groups of the index that a graph writes beside each layer.

    max_rows: the most that a graph has.
    """

    def __init__(
        self, layout: RetrievalLayout, num_stages: int, config: VllmConfig, device: torch.device
    ) -> None:
        self.max_rows, self._unit, self._device = most_rows(config), layout.unit, device
        # Each column begins at a multiple of 16 bytes, for which kernels are compiled.
        self._room = -(-self.max_rows // 4) * 4
        # All in one place, for one copy a step.
        size = num_stages, (NUM_FIELDS + 2) * self._room
        self._held = torch.zeros(*size, dtype=torch.int32, device=device)
        # The host's part of it, and how many rows it has. What goes to the device is copied first.
        host = np.zeros(size, dtype=np.int32)
        end, self._host, self._set = NUM_FIELDS * self._room, host, 0
        self._fields = host[:, :end].reshape(num_stages, NUM_FIELDS, self._room)
        self._offsets = host[:, end:].view(np.int64)
        # Views of both, by the number of rows.
        self._batches: dict[int, list[list[RetrievalRows]]] = {}
        # Only rows of one request that follow one another may read what their step fills.
        drafts = config.num_speculative_tokens
        if config.scheduler_config.async_scheduling:
            drafts *= 2  # Those of the step before may or may not be there.
        self._groups_a_request = num_stages * (1 + drafts // layout.group) if drafts else 0
        most = config.scheduler_config.max_num_seqs * self._groups_a_request
        self._groups = torch.full((most, 3), -1, dtype=torch.int32, device=device)

    @property
    def buffers(self) -> list[Tensor]:
        """Device memory that graphs read."""
        return [self._held, self._groups]

    def set(
        self, step: RetrievalStep | None, num_rows: int, num_reqs: int, late: Tensor | None = None
    ) -> None:
        """Writes what a graph of so many rows and requests is about to read.

        step: None while it is captured: its rows do nothing. late: see ``Retrieval.graph_pass``.
        """
        groups = self.full_groups(num_reqs)
        before, size = self._set, 0
        if step is not None:
            requests, lens = step.each_row
            size = len(requests)
            columns = np.arange(size), requests, lens, step.budgets[requests]
            fill(self._fields, self._offsets, columns, self._unit)
        if before > size:
            self._fields[..., size:before] = 0
            self._offsets[..., size:before] = 0
        self._set = size
        async_tensor_h2d(self._host, out=self._held)
        if step is not None and late is not None:
            floors = np.zeros((len(self._host), num_rows), dtype=np.int32)
            floors[:, :size] = step.floors_of(requests, lens)
            known = async_tensor_h2d(floors, device=self._device)
            for (rows,), least in zip(self.batches(num_rows), known, strict=True):
                rows.take_back(late, least)
        if groups is not None:
            filled = np.full((len(groups), 3), -1, dtype=np.int32)
            if step is not None and step.filled is not None:
                assert len(step.filled) <= len(filled), "a CUDA graph writes fewer groups"
                filled[: len(step.filled)] = step.filled
            async_tensor_h2d(filled, out=groups)

    def batches(self, num_rows: int) -> Sequence[Sequence[RetrievalRows]]:
        """By stage, the rows of a graph that has so many, in one batch."""
        batches = self._batches.get(num_rows)
        if batches is None:
            end = NUM_FIELDS * self._room
            batches = self._batches[num_rows] = [
                [
                    RetrievalRows.of_fields(
                        held[:end].view(NUM_FIELDS, self._room), held[end:].view(torch.int64)
                    ).first(num_rows)
                ]
                for held in self._held
            ]
        return batches

    def full_groups(self, num_reqs: int) -> Tensor | None:
        """What a graph of so many requests writes; None where no tokens are drafted."""
        if not self._groups_a_request:
            return None
        return self._groups[: num_reqs * self._groups_a_request]
