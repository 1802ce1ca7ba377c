"""Keeps the sidecars up to date: groups that a step filled are quantised in all layers at once.

Once a step rather than beside each layer's attention: a decode step fills a group for one request
in 32, and its CUDA graph need not know. What is full when a step ends is read by later steps only,
but for generated tokens that several at a time are computed again, after preemption.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.sidecar import (
    Sidecar,
    SidecarLayout,
    SidecarWriter,
    write_groups_reference,
)
from vllm_kvx.policy.storage import IntArray
from vllm_kvx.worker.timing import PhaseTimer


class Sidecars:
    """The sidecars of a model's layers.

    views: by layer, keys and values and their sidecar; bound when first used, as vLLM allocates
        its cache late and, to profile, more than once.
    """

    def __init__(
        self, layers: Sequence[Any], max_num_reqs: int, in_torch: bool, device: torch.device
    ) -> None:
        """layers: ``taps.LayerTap``, their KV groups set when `bind` is called.

        in_torch: write in plain torch, not by a kernel.
        """
        self._layers, self._device, self._in_torch = layers, device, in_torch
        self._is_fresh = np.zeros(max_num_reqs, dtype=bool)
        self._pending: Tensor | np.ndarray | None = None
        self.timer = PhaseTimer(device)

    def bind(self, layout: SidecarLayout, block_tables: BlockTables) -> None:
        """vLLM has allocated a KV cache, whose pages have such sidecars."""
        self.layout, self._tables = layout, block_tables
        self._writer: SidecarWriter | None = None
        self.views: list[tuple[PagedKV, Sidecar] | None] = [None] * len(self._layers)

    def view(self, index: int) -> tuple[PagedKV, Sidecar]:
        """Keys and values of a layer, and their sidecar."""
        views = self.views[index]
        if views is None:
            tap = self._layers[index]
            kv_cache = tap.layer.kv_cache
            views = tap.paged(), Sidecar.of(kv_cache, self.layout)
            self.views[index] = views
        return views

    @property
    def writer(self) -> SidecarWriter:
        if self._writer is None:
            self._writer = SidecarWriter(
                [self.view(i) for i in range(len(self._layers))],
                [tap.group for tap in self._layers],
                [tap.stage for tap in self._layers],
            )
        return self._writer

    def add_request(self, req_index: int) -> None:
        self._is_fresh[req_index] = True

    def is_fresh(self, requests: np.ndarray) -> np.ndarray:
        """(R,) bool: requests that have run no step yet."""
        return self._is_fresh[requests]

    def plan(
        self, requests: np.ndarray, before: IntArray, after: IntArray, moved: np.ndarray
    ) -> None:
        """Says which groups to write after the coming forward pass.

        Args:
            requests: (R,) request states.
            before, after: (S, R) entries in the cache.
            moved: (S, R) bool, where entries that were there get other places.
        """
        self.timer.collect()
        first, last = before // self.layout.group, after // self.layout.group
        # Entries that came with a prefix hit: above the first segment they are copied anchors.
        first[1:, self._is_fresh[requests]] = 0
        self._is_fresh[requests] = False
        first[moved] = 0
        segments, rows = np.nonzero(last > first)
        counts = (last - first)[segments, rows]
        self._pending = None
        if not len(counts):
            return
        jobs = np.empty((counts.sum(), 3), dtype=np.int32)
        jobs[:, 0] = np.repeat(segments, counts)
        jobs[:, 1] = np.repeat(requests[rows], counts)
        start = first[segments, rows] - (np.cumsum(counts) - counts)
        jobs[:, 2] = np.arange(len(jobs)) + np.repeat(start, counts)
        self._pending = jobs if self._in_torch else async_tensor_h2d(jobs, device=self._device)

    def write(self, layer: int | None = None) -> None:
        """Quantises the groups of the plan in all layers, or in one."""
        if self._pending is None:
            return
        with self.timer:
            if isinstance(self._pending, Tensor):
                pointers, strides = self._tables.block_table_ptrs, self._tables.block_table_strides
                self.writer.write(self._pending, pointers, strides, layer)
            else:
                self._write_in_torch(self._pending, layer)
        if layer is None:
            self._pending = None

    def _write_in_torch(self, jobs: np.ndarray, layer: int | None) -> None:
        for index in range(len(self._layers)) if layer is None else (layer,):
            tap = self._layers[index]
            paged, sidecar = self.view(index)
            mine = jobs[jobs[:, 0] == tap.stage]
            for request in np.unique(mine[:, 1]).tolist():
                groups = mine[mine[:, 1] == request, 2]
                table = self._tables.block_tables[tap.group].gpu[request]
                begin, end = int(groups[0]), int(groups[-1]) + 1
                write_groups_reference(paged, sidecar, table, begin, end)
