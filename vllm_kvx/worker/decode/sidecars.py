"""Keeps the sidecars up to date: groups that a step filled are written in all layers at once.

Once a step rather than beside each layer's attention: a decode step fills a group for one request
in 32, and its CUDA graph need not know. Only later steps read a group that is full when a step
ends. The exceptions are a request that resumes after preemption and one whose tokens are drafted:
both compute several generated tokens at once, and their groups are written beside each layer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_kvx.indexes.base import AnyIndex, Writer
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.index_layout import PageShape
from vllm_kvx.policy.storage import IntArray
from vllm_kvx.worker.decode.step import HookedLayer
from vllm_kvx.worker.timing import PhaseTimer


class Sidecars:
    """The sidecars of a model's layers.

    views: by layer, keys and values and their sidecar; bound when first used, as vLLM allocates
        its cache late and, to profile, more than once.
    """

    def __init__(
        self,
        index: AnyIndex,
        layers: Sequence[HookedLayer],
        max_num_reqs: int,
        in_torch: bool,
        loads: bool,
        device: torch.device,
    ) -> None:
        """layers: their KV groups are known when `bind` is called.

        in_torch: write in plain torch, not by a kernel. loads: a KV connector may load entries,
        and leaves sidecars behind: it copies keys and values alone.
        """
        self._index, self._layers, self._device = index, layers, device
        self._in_torch, self._loads = in_torch, loads
        self._is_fresh = np.zeros(max_num_reqs, dtype=bool)
        self._pending: Tensor | np.ndarray | None = None
        self._left_behind: Tensor | np.ndarray | None = None
        self._read_first: Tensor | np.ndarray | None = None
        self.timer = PhaseTimer(device)

    def bind(self, shape: PageShape, block_tables: BlockTables) -> None:
        """vLLM has allocated a KV cache, whose pages have sidecars of this shape."""
        self.shape, self._tables = shape, block_tables
        self.release()

    def release(self) -> None:
        """Forgets the views of the KV cache, until one is asked for again."""
        self._writer: Writer | None = None
        self.views: list[tuple[PagedKV, Any] | None] = [None] * len(self._layers)

    def view(self, layer: int) -> tuple[PagedKV, Any]:
        """Keys and values of a layer, and their sidecar."""
        views = self.views[layer]
        if views is None:
            hook = self._layers[layer]
            # Whoever asks first, views are written to within inference mode and outside.
            with torch.inference_mode(False):
                views = hook.paged(), self._index.view(hook.layer.kv_cache, self.shape)
            self.views[layer] = views
        return views

    @property
    def writer(self) -> Writer:
        """Writes by a kernel; made when first used, as `views`."""
        if self._writer is None:
            self._writer = self._index.writer(
                [self.view(i) for i in range(len(self._layers))],
                [hook.group for hook in self._layers],
                [hook.stage for hook in self._layers],
            )
        return self._writer

    @property
    def kernel_writer(self) -> Writer | None:
        """`writer`; None where torch writes."""
        return None if self._in_torch else self.writer

    def add_request(self, req_index: int) -> None:
        """A request takes this state; it has run no step yet."""
        self._is_fresh[req_index] = True

    def is_fresh(self, requests: np.ndarray) -> np.ndarray:
        """(R,) bool: requests that have run no step yet."""
        return self._is_fresh[requests]

    def plan(
        self,
        requests: np.ndarray,
        before: IntArray,
        after: IntArray,
        moved: np.ndarray,
        published: IntArray,
        read: IntArray,
        has_gap: np.ndarray,
    ) -> None:
        """Decides which groups to write after the coming forward pass.

        Args:
            requests: (R,) request states.
            before, after: (S, R) entries in the cache.
            moved: (S, R) bool, where entries that were there get other places.
            published: (S, R) entries up to which the blocks stay in the prefix cache that the
                request moves out of; 0 where it does not.
            read: (S, R) entries up to which rows of this step read groups before entries move; 0
                where none do.
            has_gap: (S, R) bool, where positions are left out.
        """
        self.timer.collect()
        first, last = before // self.shape.group, after // self.shape.group
        # Entries that came with a prefix hit have no sidecar if they are copied anchors, where
        # positions are left out, or may have been loaded.
        first[(has_gap | self._loads) & self._is_fresh[requests]] = 0
        self._is_fresh[requests] = False
        self._left_behind = self._planned(requests, first, published // self.shape.group)
        self._read_first = self._planned(requests, first, read // self.shape.group)
        first[moved] = 0
        self._pending = self._planned(requests, first, last)

    def plan_decodes(self, requests: np.ndarray, stored: IntArray, counts: IntArray) -> None:
        """`plan` of a step in which requests add entries past their prompts; none is fresh.

        requests: (R,) request states. stored: (S, R) entries in the cache, the (R,) `counts` new
            ones included. A group that rejected ones fill is written again with those that stay.
        """
        self.timer.collect()
        self._left_behind = self._read_first = None
        self._pending = self._as_written(self.groups_of_decodes(requests, stored, counts))

    def groups_of_decodes(
        self, requests: np.ndarray, stored: IntArray, counts: IntArray
    ) -> np.ndarray | None:
        """What `plan_decodes` plans: (n, 3) int32, as ``Writer.write`` takes it; None for none."""
        group = self.shape.group
        if not (stored % group < counts).any():
            return None
        return _full_groups(requests, (stored - counts) // group, stored // group)

    def plan_drafts(self, requests: np.ndarray, least: IntArray, most: IntArray) -> None:
        """`plan` of a pass that adds a drafted entry to each request, beside whose layers to write.

        requests: (P,) request states. least, most: (P,) entries in the cache, the new one included:
            bounds of a number that the device knows. A group that is not full yet by that number is
            read by nobody, and written again once it is.
        """
        self._pending = self._as_written(self.groups_of_drafts(requests, least, most))

    def groups_of_drafts(
        self, requests: np.ndarray, least: IntArray, most: IntArray
    ) -> np.ndarray | None:
        """What `plan_drafts` plans: (n, 3) int32, as ``Writer.write`` takes it; None for none."""
        group = self.shape.group
        if not (most % group <= most - least).any():
            return None
        return _full_groups(requests, ((least - 1) // group)[None], (most // group)[None])

    def write_groups(self, full_groups: Tensor, layer: int) -> None:
        """Writes these (n, 3) groups in one layer; those of no stage, such as -1, are left out.

        Within a CUDA graph, which reads what they are when it replays, and cannot be timed.
        """
        if self._in_torch:
            self._write_in_torch(full_groups.numpy(), layer)
        else:
            pointers, strides = self._tables.block_table_ptrs, self._tables.block_table_strides
            self.writer.write(full_groups, pointers, strides, layer)

    def forget(self) -> None:
        """What is planned is written where it is read."""
        self._pending = None

    def _planned(
        self, requests: np.ndarray, first: IntArray, last: IntArray
    ) -> Tensor | np.ndarray | None:
        """``_full_groups``, where they are written."""
        return self._as_written(_full_groups(requests, first, last))

    def _as_written(self, full_groups: np.ndarray | None) -> Tensor | np.ndarray | None:
        if full_groups is None or self._in_torch:
            return full_groups
        return async_tensor_h2d(full_groups, device=self._device)

    def write_left_behind(self) -> None:
        """Writes the groups of blocks that requests are about to move out of."""
        full_groups, self._left_behind = self._left_behind, None
        self._write(full_groups, None)

    def write(self, layer: int | None = None) -> None:
        """Writes the groups of the plan in all layers, or in one.

        In one: for rows of the same step, which may read blocks that are about to be left behind,
        or entries that are about to move.
        """
        self._write(self._pending, layer)
        if layer is None:
            self._pending = self._read_first = None
        else:
            self._write(self._left_behind, layer)
            self._write(self._read_first, layer)

    def _write(self, full_groups: Tensor | np.ndarray | None, layer: int | None) -> None:
        if full_groups is None:
            return
        with self.timer:
            if isinstance(full_groups, Tensor):
                pointers, strides = self._tables.block_table_ptrs, self._tables.block_table_strides
                self.writer.write(full_groups, pointers, strides, layer)
            else:
                self._write_in_torch(full_groups, layer)

    def _write_in_torch(self, full_groups: np.ndarray, layer: int | None) -> None:
        for number in range(len(self._layers)) if layer is None else (layer,):
            hook = self._layers[number]
            paged, sidecar = self.view(number)
            mine = full_groups[full_groups[:, 0] == hook.stage]
            for request in np.unique(mine[:, 1]).tolist():
                groups = mine[mine[:, 1] == request, 2]
                table = self._tables.block_tables[hook.group].gpu[request]
                begin, end = int(groups[0]), int(groups[-1]) + 1
                self._index.write_in_torch(paged, sidecar, table, begin, end)


def _full_groups(requests: np.ndarray, first: IntArray, last: IntArray) -> np.ndarray | None:
    """(n, 3) int32 stage, request state and group, of groups [first, last); None for none.

    requests: (R,) request states. first, last: (S, R).
    """
    stages, rows = np.nonzero(last > first)
    counts = (last - first)[stages, rows]
    if not len(counts):
        return None
    full_groups = np.empty((counts.sum(), 3), dtype=np.int32)
    full_groups[:, 0] = np.repeat(stages, counts)
    full_groups[:, 1] = np.repeat(requests[rows], counts)
    start = first[stages, rows] - (np.cumsum(counts) - counts)
    full_groups[:, 2] = np.arange(len(full_groups)) + np.repeat(start, counts)
    return full_groups
