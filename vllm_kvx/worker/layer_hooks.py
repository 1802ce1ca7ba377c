"""What happens beside a layer's attention in the step that brings a prompt in.

A tap runs right after a layer's attention: the layer's keys are in the cache, its queries are at
hand, and nobody needs the entries any more that retention is about to drop. So saliency,
selection and compaction of a layer follow one another there, on device and without a copy of the
scores beyond the layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvx.equations.saliency import per_kv_head
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.attention_metrics import window_metrics
from vllm_kvx.ops.prompt.blocks import top_blocks
from vllm_kvx.ops.prompt.saliency import pool_per_kv_head, window_saliency
from vllm_kvx.ops.prompt.select import move_entries, select_kept, select_moves
from vllm_kvx.policy.axes import DENSE_LAYERS
from vllm_kvx.worker.decode.retrieval import Mode, Retrieval, RetrievalPass
from vllm_kvx.worker.timing import PhaseTimer


@dataclass(frozen=True)
class Prompt:
    """A prompt that comes in, as one pass over one segment sees it.

    Attributes:
        batch_index: its place in the batch.
        num_keys: entries that the segment holds of it.
        window: its last prompt tokens, whose queries score the keys; 0 if nothing is scored.
        kernel: width of the max-pooling.
        first_row: row of the pass that holds its first window query; may be negative where a part
            of the window ran in an earlier chunk, which `slot` then holds.
        slot: where its window's queries are kept, or None if they are all in this pass.
        cap: entries that stay; `num_keys` if all do.
        sinks: first entries that stay, where retention goes by position; None where by saliency.
        propagated: tokens to choose for the layers above, after the segment's last layer; 0 if
            none are chosen.
        per_layer: all KV heads keep the same entries, by the layer's saliency summed over its
            heads (StructKV Eq. 13); else each keeps its own.
        decay: tokens are chosen by centrality, the layers' saliency added up with this weight for
            what came before (StructKV Eq. 3); None if by the last layer's saliency.
        measures: each layer's entropy, sparsity and variance are kept in ``Taps.metrics``.
        ranks_blocks: after the segment's last layer the prompt's blocks are ranked by centrality;
            by segment, `kept` has the entries that stay, 0 where none go, and whether it computes
            every token.
    """

    req_id: str
    batch_index: int
    num_keys: int
    window: int
    kernel: int
    first_row: int
    slot: int | None
    cap: int
    sinks: int | None = None
    propagated: int = 0
    per_layer: bool = False
    decay: float | None = None
    measures: bool = False
    ranks_blocks: bool = False
    kept: tuple[tuple[int, bool], ...] = ()

    @property
    def is_scored_everywhere(self) -> bool:
        return (self.cap < self.num_keys and self.sinks is None) or self.decay is not None


@dataclass(frozen=True)
class WindowRows:
    """Window queries of one chunk that a later one needs: rows of the pass, and their places."""

    rows: Tensor  # (n,) int64
    slots: Tensor  # (n,) int64
    places: Tensor  # (n,) int64, index within the window


class _Batch:
    """Prompts whose keys a layer scores, with everything about them on device."""

    def __init__(self, prompts: Sequence[Prompt], max_window: int, device: torch.device) -> None:
        self.prompts = prompts
        self.max_num_keys = max(p.num_keys for p in prompts)
        self.total_keys = sum(p.num_keys for p in prompts)
        # The server's longest: in a shorter one sums would be formed in another order.
        self.max_window = max_window
        self.max_moves = max(min(p.cap, p.num_keys - p.cap) for p in prompts)
        self.total_caps = sum(p.cap for p in prompts)
        # Where each prompt's columns are.
        ends = np.cumsum([p.num_keys for p in prompts]).tolist()
        self.columns = [slice(e - p.num_keys, e) for p, e in zip(prompts, ends, strict=True)]
        self.per_layer = [p.per_layer for p in prompts]
        self.needs_total = any(p.per_layer or p.decay is not None for p in prompts)

        def column(values: list[int]) -> Tensor:
            return async_tensor_h2d(np.array(values, dtype=np.int32), device=device)

        def offsets(counts: list[int]) -> Tensor:
            return async_tensor_h2d(np.cumsum([0, *counts], dtype=np.int64), device=device)

        self.num_keys = column([p.num_keys for p in prompts])
        self.windows = column([p.window for p in prompts])
        self.kernels = column([p.kernel for p in prompts])
        self.caps = column([p.cap for p in prompts])
        self.offsets = offsets([p.num_keys for p in prompts])
        self.cap_offsets = offsets([p.cap for p in prompts])
        self.indices = async_tensor_h2d(
            np.array([p.batch_index for p in prompts], dtype=np.int64), device=device
        )
        # Rows that are not in this pass are read from row 0 and replaced.
        rows = np.zeros((len(prompts), self.max_window), dtype=np.int64)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: prompt.window] = np.maximum(
                np.arange(prompt.first_row, prompt.first_row + prompt.window), 0
            )
        self.rows = async_tensor_h2d(rows.ravel(), device=device)
        split = [(f, p.slot) for f, p in enumerate(prompts) if p.slot is not None]
        self.split = None
        if split:
            self.split = (
                async_tensor_h2d(np.array([f for f, _ in split], dtype=np.int64), device=device),
                async_tensor_h2d(np.array([s for _, s in split], dtype=np.int64), device=device),
            )

    def block_tables(self, table: Tensor) -> Tensor:
        """(R, B) tables of the batch's requests -> (F, B') of these prompts."""
        return table.index_select(0, self.indices)


class _Selection:
    """The prompts of a batch that choose tokens for the layers above."""

    def __init__(self, batch: _Batch, device: torch.device) -> None:
        chosen = [f for f, p in enumerate(batch.prompts) if p.propagated]
        counts = [batch.prompts[f].propagated for f in chosen]
        index = async_tensor_h2d(np.array(chosen, dtype=np.int64), device=device)
        self.num_keys = batch.num_keys.index_select(0, index)
        self.windows = batch.windows.index_select(0, index)
        self.offsets = batch.offsets.index_select(0, index)
        self.counts = async_tensor_h2d(np.array(counts, dtype=np.int32), device=device)
        self.out_offsets = async_tensor_h2d(np.cumsum([0, *counts], dtype=np.int64), device=device)
        self.total = sum(counts)


class _Moves:
    """Moves that are the same in every layer and head: retention by position."""

    def __init__(self, prompts: Sequence[Prompt], num_heads: int, device: torch.device) -> None:
        sources: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        for p in prompts:
            # The last cap - sinks entries stay; those beyond the first `cap` slots fill the gap.
            recent = p.num_keys - (p.cap - p.sinks)  # type: ignore[operator]
            sources.append(np.arange(max(p.cap, recent), p.num_keys))
            targets.append(np.arange(p.sinks, min(p.cap, recent)))
        counts = [len(s) for s in sources]

        def everywhere(columns: list[np.ndarray]) -> Tensor:
            flat = async_tensor_h2d(np.concatenate(columns).astype(np.int32), device=device)
            return flat.expand(num_heads, -1).contiguous()

        self.sources, self.targets = everywhere(sources), everywhere(targets)
        count = async_tensor_h2d(np.array(counts, dtype=np.int32), device=device)
        self.num_moves = count.expand(num_heads, -1).contiguous()
        self.offsets = async_tensor_h2d(np.cumsum([0, *counts], dtype=np.int64), device=device)
        self.max_moves = max(counts)
        self.indices = async_tensor_h2d(
            np.array([p.batch_index for p in prompts], dtype=np.int64), device=device
        )


@dataclass
class SegmentTap:
    """The work of one pass beside the attention of one segment's layers.

    Attributes:
        block_tables: (R, B) int32 of the batch, by KV group.
        every: prompts scored in every layer; `last`: those scored in the segment's last layer.
        kept: (total,) int32, the tokens chosen there, ascending, one prompt after the other;
            written by the last layer.
    """

    block_tables: Sequence[Tensor]
    every: _Batch | None = None
    last: _Batch | None = None
    selection: _Selection | None = None
    moves: _Moves | None = None
    windows: WindowRows | None = None
    kept: Tensor | None = field(default=None)

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        block_tables: Sequence[Tensor],
        taps: "Taps",
        windows: WindowRows | None = None,
    ) -> "SegmentTap | None":
        """The tap for these prompts; None if there is nothing to do."""
        scored = [p for p in prompts if p.is_scored_everywhere]
        scored_last = [p for p in prompts if p.is_scored_everywhere or p.propagated]
        by_position = [p for p in prompts if p.sinks is not None and p.cap < p.num_keys]
        if not (scored_last or by_position or windows):
            return None
        device = taps.queries.device
        tap = cls(block_tables, windows=windows)
        if scored:
            tap.every = _Batch(scored, taps.max_window, device)
        if scored_last:
            same = len(scored_last) == len(scored)
            tap.last = tap.every if same else _Batch(scored_last, taps.max_window, device)
        if any(p.propagated for p in scored_last):
            assert tap.last is not None
            tap.selection = _Selection(tap.last, device)
        if by_position:
            tap.moves = _Moves(by_position, taps.num_kv_heads, device)
        return tap


class LayerTap:
    """Wraps one layer's attention implementation; does nothing unless its segment has a tap.

    layer: vLLM's attention layer. index: its number. segment, is_last: the segment it is in, and
    whether it is that one's last layer. group: its KV group, set once groups are formed.
    """

    def __init__(self, taps: "Taps", layer: Any, index: int, segment: int, is_last: bool) -> None:
        self.taps, self.layer, self.index = taps, layer, index
        self.segment, self.is_last = segment, is_last
        self.group = 0
        stock: Callable[..., Any] = layer.impl.forward

        def forward(
            layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, *args: Any, **kw: Any
        ) -> Any:
            retrieves = self.taps.retrieval_pass if self.index >= DENSE_LAYERS else None
            mode = Mode.DENSE if retrieves is None else retrieves.modes[self.segment]
            out = kw.get("output")
            if mode is not Mode.ALL:
                out = stock(layer, query, key, value, kv_cache, *args, **kw)
            if self.taps.current is not None:
                tap = self.taps.current[self.segment]
                if tap is not None:
                    self._run(tap, query, kv_cache)
            if mode is not Mode.DENSE:
                assert retrieves is not None and self.taps.retrieval is not None
                self.taps.retrieval.run(retrieves, self, self._unquantized(query), kw["output"])
            return out

        layer.impl.forward = forward

    @property
    def stage(self) -> int:
        return self.segment

    def paged(self) -> PagedKV:
        return self.taps.paged(self.layer, self.layer.kv_cache)

    def _unquantized(self, query: Tensor) -> Tensor:
        """(N, H, D) in the model's dtype."""
        query = query.view(query.shape[0], self.layer.impl.num_heads, self.layer.impl.head_size)
        if query.dtype.itemsize == 1:  # Quantised for the attention kernel.
            query = (query.to(torch.float32) * self.layer._q_scale).to(self.taps.dtype)
        return query

    def _run(self, tap: SegmentTap, query: Tensor, kv_cache: Tensor) -> None:
        layer = self.layer
        with self.taps.timer:
            query = self._unquantized(query)
            if tap.windows is not None:
                rows = query.index_select(0, tap.windows.rows)
                self.taps.queries[tap.windows.slots, self.index, tap.windows.places] = rows
            paged = self.taps.paged(layer, kv_cache)
            table = tap.block_tables[self.group]
            batch = tap.last if self.is_last else tap.every
            if batch is not None:
                self._score(tap, batch, query, paged, batch.block_tables(table))
            if tap.moves is not None:
                moves = tap.moves
                move_entries(
                    paged,
                    table.index_select(0, moves.indices),
                    moves.sources,
                    moves.targets,
                    moves.num_moves,
                    moves.offsets,
                    moves.max_moves,
                )
                self.taps.moved += moves.num_moves.sum()

    def _score(
        self, tap: SegmentTap, batch: _Batch, query: Tensor, paged: PagedKV, tables: Tensor
    ) -> None:
        layer, impl = self.layer, self.layer.impl
        queries = query.index_select(0, batch.rows)
        queries = queries.view(len(batch.prompts), batch.max_window, *query.shape[1:])
        if batch.split is not None:
            here, slots = batch.split
            queries[here] = self.taps.queries[slots, self.index, : batch.max_window]
        scores = window_saliency(
            queries,
            paged,
            tables,
            batch.num_keys,
            batch.windows,
            batch.offsets,
            batch.max_num_keys,
            batch.total_keys,
            impl.scale,
            key_scale=layer._k_scale_float if paged.keys.dtype.itemsize == 1 else 1.0,
        )
        if any(p.measures for p in batch.prompts):
            self._measure(batch, queries, paged, tables)
        scores = pool_per_kv_head(
            scores,
            impl.num_kv_heads,
            batch.num_keys,
            batch.windows,
            batch.offsets,
            batch.kernels,
            batch.max_num_keys,
        )
        total = scores
        selects = self.is_last and tap.selection is not None
        if selects or batch.needs_total:
            # Every rank has some of the heads, and all must choose the tokens that one would: so
            # the heads are gathered, and added up in their order.
            total = per_kv_head(tensor_model_parallel_all_gather(scores, dim=0), 1)
        centrality = {}
        if any(prompt.decay is not None for prompt in batch.prompts):
            with self.taps.detector_timer:
                centrality = self.taps.add_up(batch, total)
        if self.is_last and tap.selection is not None:
            chosen = tap.selection
            by = total.clone() if centrality else total
            for columns, values in centrality.values():
                by[0, columns] = values
            tap.kept = select_kept(
                by,
                chosen.num_keys,
                chosen.windows,
                chosen.counts,
                chosen.offsets,
                chosen.out_offsets,
                chosen.total,
            )[0]
        if self.is_last:
            self.taps.end_centrality(batch, tap.kept, paged.block_size)
        if batch.max_moves:
            if all(batch.per_layer):
                scores = total
            elif any(batch.per_layer):
                for columns, same in zip(batch.columns, batch.per_layer, strict=True):
                    if same:
                        scores[:, columns] = total[:, columns]
            sources, targets, num_moves = select_moves(
                scores,
                batch.num_keys,
                batch.windows,
                batch.caps,
                batch.offsets,
                batch.cap_offsets,
                batch.total_caps,
            )
            if scores.shape[0] < impl.num_kv_heads:  # One choice for all heads.
                sources, targets, num_moves = (
                    choice.expand(impl.num_kv_heads, -1) for choice in (sources, targets, num_moves)
                )
            move_entries(
                paged,
                tables,
                sources,
                targets,
                num_moves.contiguous(),
                batch.cap_offsets,
                batch.max_moves,
            )
            self.taps.moved += num_moves.sum()

    def _measure(self, batch: _Batch, queries: Tensor, paged: PagedKV, tables: Tensor) -> None:
        layer, impl = self.layer, self.layer.impl
        measured = [f for f, p in enumerate(batch.prompts) if p.measures]
        index = async_tensor_h2d(np.array(measured, dtype=np.int64), device=queries.device)
        with self.taps.detector_timer:
            heads = window_metrics(
                queries[index],
                paged,
                tables[index],
                batch.num_keys[index],
                batch.windows[index],
                max(batch.prompts[f].num_keys for f in measured),
                impl.scale,
                key_scale=layer._k_scale_float if paged.keys.dtype.itemsize == 1 else 1.0,
            )
            # As for saliency: every rank averages over all heads, in their order.
            means = tensor_model_parallel_all_gather(heads, dim=1).double().mean(dim=1)
        for f, values in zip(measured, means, strict=True):
            self.taps.metrics.setdefault(batch.prompts[f].req_id, []).append(values)


class Taps:
    """The taps of a model's layers.

    current: by segment, what the running pass does; None outside of such a pass.
    retrieval: of the server, if it retrieves; retrieval_pass: what the running pass retrieves.
    queries: (slots, L, W, H, D) model dtype, windows that are spread over several chunks.
    metrics: by request, (3,) float64 of every layer so far: entropy, sparsity, variance.
    moved: () int64, entries of one KV head that retention copied to another slot.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        segment_sizes: Sequence[int],
        split_windows: int,
        max_window: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.current: Sequence[SegmentTap | None] | None = None
        self.retrieval: Retrieval | None = None
        self.retrieval_pass: RetrievalPass | None = None
        self.dtype = dtype
        self.timer = PhaseTimer(device)
        self.detector_timer = PhaseTimer(device)
        self.metrics: dict[str, list[Tensor]] = {}
        impl = layers[0].impl
        self.num_kv_heads: int = impl.num_kv_heads
        self.max_window = max_window
        shape = (split_windows, len(layers), max_window, impl.num_heads, impl.head_size)
        self.queries = torch.empty(shape if max_window else (0,), dtype=dtype, device=device)
        self._centrality: dict[str, Tensor] = {}
        # Blocks that stay, of prompts that came in with this step, until `take_blocks`.
        self._blocks: dict[str, dict[int, Tensor]] = {}
        self.moved = torch.zeros((), dtype=torch.int64, device=device)
        self.layers: list[LayerTap] = []
        for segment, size in enumerate(segment_sizes):
            for offset in range(size):
                index = len(self.layers)
                is_last = offset == size - 1
                self.layers.append(LayerTap(self, layers[index], index, segment, is_last))

    def add_up(self, batch: _Batch, saliency: Tensor) -> dict[str, tuple[slice, Tensor]]:
        """Adds a layer's saliency (1, total) to the centrality of the prompts that want it.

        Returns their columns and centrality so far (n,).
        """
        summed = {}
        for prompt, columns in zip(batch.prompts, batch.columns, strict=True):
            if prompt.decay is None:
                continue
            now = saliency[0, columns]
            before = self._centrality.get(prompt.req_id)
            now = now.clone() if before is None else before.mul_(prompt.decay).add_(now)
            self._centrality[prompt.req_id] = now
            summed[prompt.req_id] = columns, now
        return summed

    def end_centrality(self, batch: _Batch, selected: Tensor | None, block_size: int) -> None:
        """After a segment's last layer: ranks blocks where wanted, and forgets what is over.

        selected: (total,) int32, as ``SegmentTap.kept``.
        """
        offset = 0
        for prompt in batch.prompts:
            offset += prompt.propagated
            if not (prompt.propagated or prompt.ranks_blocks):
                continue
            values = self._centrality.pop(prompt.req_id, None)
            if not prompt.ranks_blocks:
                continue
            assert values is not None
            upper = values
            if prompt.propagated:
                assert selected is not None
                upper = values.index_select(0, selected[offset - prompt.propagated : offset])
            self._blocks[prompt.req_id] = {
                segment: top_blocks(
                    values if is_lower else upper,
                    num_blocks=-(-kept // block_size),
                    block_size=block_size,
                    window=prompt.window,
                )
                for segment, (kept, is_lower) in enumerate(prompt.kept)
                if kept
            }

    def select_central(self, prompt: Prompt, count: int) -> Tensor:
        """The `count` most central tokens of a prompt, (count,) int64 ascending; ends its sum."""
        values = self._centrality.pop(prompt.req_id)
        self.metrics.pop(prompt.req_id, None)

        def column(value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((1,), value, dtype=dtype, device=values.device)

        zero = column(0, torch.int64)
        return select_kept(
            values[None],
            column(prompt.num_keys),
            column(prompt.window),
            column(count),
            torch.cat([zero, column(prompt.num_keys, torch.int64)]),
            torch.cat([zero, column(count, torch.int64)]),
            count,
        )[0].long()

    @property
    def bytes_moved(self) -> int:
        """Bytes of keys and values that this rank copied to other slots; waits for the device."""
        impl = self.layers[0].layer.impl
        width = self.layers[0].layer.kv_cache_torch_dtype.itemsize
        return int(self.moved.item()) * 2 * impl.head_size * width

    def take_blocks(self) -> dict[str, dict[int, Tensor]]:
        """By request and segment, which blocks stay: (k,) int64 ascending, on the device."""
        blocks, self._blocks = self._blocks, {}
        return blocks

    def paged(self, layer: Any, kv_cache: Tensor) -> PagedKV:
        """The layer's cache, addressed entry by entry."""
        if kv_cache.dtype == torch.uint8:
            e5m2 = layer.kv_cache_dtype == "fp8_e5m2"
            kv_cache = kv_cache.view(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn)
        isa = getattr(layer, "isa", None) if kv_cache.device.type == "cpu" else None
        return PagedKV.of(kv_cache, layer.impl.head_size, cpu_isa=isa)
