"""The device side of a step's prompts: taps, stash writes, and passes of selected tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_kvx.models.decoder import SelectedPass, StashWrite, StepPlan
from vllm_kvx.policy.storage import STASH_PAGE
from vllm_kvx.worker.layer_hooks import Prompt, SegmentTap, Taps, WindowRows
from vllm_kvx.worker.prefill.chunks import (
    Piece,
    PromptChunk,
    SegmentPlan,
    pack_selected,
    plan_direct,
)
from vllm_kvx.worker.prefill.stash import Stash
from vllm_kvx.worker.rows import SegmentRows


@dataclass(frozen=True)
class SelectedBatch:
    """The batch that one pass of selected tokens is to the attention backends.

    Attributes:
        indices: (P,) places in the step's batch. counts: (P,) rows. ends: (P,) stored lengths.
        positions: (N,) int64 token positions.
        block_tables: (P, B) int32 and slot_mappings: (N,) int64 by KV group.
    """

    indices: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    positions: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mappings: Tensor

    def of(self, batch: InputBatch) -> InputBatch:
        """`batch`, the step's, cut down to these rows."""
        device = self.positions.device
        starts = np.zeros(len(self.counts) + 1, dtype=np.int32)
        np.cumsum(self.counts, out=starts[1:])
        num_rows = int(starts[-1])
        return replace(
            batch,
            num_reqs=len(self.indices),
            num_reqs_after_padding=len(self.indices),
            idx_mapping_np=batch.idx_mapping_np[self.indices],
            num_scheduled_tokens=self.counts,
            num_tokens=num_rows,
            num_tokens_after_padding=num_rows,
            query_start_loc=async_tensor_h2d(starts, device=device),
            query_start_loc_np=starts,
            seq_lens=async_tensor_h2d(self.ends, device=device),
            seq_lens_cpu_upper_bound=torch.from_numpy(self.ends),
            is_prefilling_np=np.ones(len(self.indices), dtype=bool),
            positions=self.positions,
        )


MetadataOf = Callable[[SelectedBatch, int], dict[str, Any]]


class PromptPasses:
    """Turns the plans of ``prompts`` into what the model runs.

    group_segments, block_sizes: by KV group. max_tokens: rows of one pass at most.
    """

    def __init__(
        self,
        taps: Taps,
        stash: Stash | None,
        group_segments: Sequence[int],
        block_sizes: Sequence[int],
        max_tokens: int,
    ) -> None:
        self.taps, self.stash = taps, stash
        self.group_segments, self.block_sizes = group_segments, block_sizes
        self.max_tokens = max_tokens
        self.device = taps.queries.device
        self.layer_names = [
            [tap.layer.layer_name for tap in taps.layers if tap.group == group]
            for group in range(len(group_segments))
        ]

    def plan(
        self,
        step: StepPlan,
        chunks: Sequence[PromptChunk],
        counts: np.ndarray,
        rows: Sequence[SegmentRows | None],
        block_tables: Sequence[Tensor],
        metadata_of: MetadataOf,
    ) -> None:
        """Adds to `step` what these prompts need; arguments as in ``plan_direct``.

        Prompts that find their pivot online are left out; see ``online``.
        """
        self.taps.timer.collect()
        self.taps.detector_timer.collect()
        direct = plan_direct(chunks, counts, rows)
        step.taps = [self.tap(plan, block_tables) for plan in direct]
        if not any(tap is not None for tap in step.taps):
            step.taps = None
        if self.stash is None:
            return
        step.stash = self.stash.states
        step.writes = [self._stash_write(plan) for plan in direct]
        starts = np.cumsum(counts)
        for first in range(1, len(rows)):
            done = [c for c in chunks if c.is_last and c.state.first_selected == first]
            offset = 0
            for pieces in pack_selected(done, self.max_tokens):
                num_rows = sum(piece.end - piece.begin for piece in pieces)
                tap = step.taps[first - 1] if step.taps else None
                assert tap is not None
                step.selected.append(  # type: ignore[attr-defined]
                    self._pass(pieces, first, tap, offset, starts, block_tables, metadata_of)
                )
                offset += num_rows

    def tap(self, plan: SegmentPlan, block_tables: Sequence[Tensor]) -> SegmentTap | None:
        windows = None
        if plan.window_rows:
            windows = WindowRows(
                *(
                    self.to_device(np.concatenate(parts))
                    for parts in (plan.window_rows, plan.window_slots, plan.window_places)
                )
            )
        return SegmentTap.of(plan.prompts, block_tables, self.taps, windows)

    def _stash_write(self, plan: SegmentPlan) -> StashWrite | None:
        if not plan.stash_rows:
            return None
        assert self.stash is not None
        targets = [
            self.stash.rows(chunk.state.req_id, chunk.begin, chunk.end)
            for chunk in plan.stash_chunks
        ]
        return StashWrite(
            self.to_device(np.concatenate(plan.stash_rows)),
            self.to_device(np.concatenate(targets)),
        )

    def _pass(
        self,
        pieces: Sequence[Piece],
        first: int,
        tap: SegmentTap,
        offset: int,
        row_ends: np.ndarray,
        block_tables: Sequence[Tensor],
        metadata_of: MetadataOf,
    ) -> Callable[[], SelectedPass]:
        """One pass, made when its turn comes; `offset` counts selected tokens before it."""
        assert self.stash is not None
        indices = np.array([piece.chunk.batch_index for piece in pieces])
        counts = np.array([piece.end - piece.begin for piece in pieces], dtype=np.int32)
        ends = np.array([piece.end for piece in pieces], dtype=np.int32)
        # Pages are read here: by the time the pass runs they may have another owner on the host.
        pages = [self.stash.pages(piece.chunk.state.req_id) for piece in pieces]

        def make() -> SelectedPass:
            num_rows = int(counts.sum())
            assert tap.kept is not None
            positions = tap.kept[offset : offset + num_rows].long()
            stash_rows = self.stash_rows(pages, counts, positions)
            batch, slot_mapping = self.batch(indices, counts, ends, positions, first, block_tables)
            done = [i for i, piece in enumerate(pieces) if piece.is_last]
            return SelectedPass(
                first_segment=first,
                stash_rows=stash_rows,
                positions=positions,
                attn_metadata=metadata_of(batch, first),
                slot_mapping=slot_mapping,
                taps=self._selected_taps(pieces, counts, first, block_tables),
                last_rows=self.to_device(np.cumsum(counts)[done] - 1),
                in_batch=self.to_device(row_ends[indices[done]] - 1),
            )

        return make

    def stash_rows(self, pages: Sequence[np.ndarray], counts: np.ndarray, at: Tensor) -> Tensor:
        """(N,) int64 rows of the stash for positions `at` (N,), `counts` of each prompt's pages."""
        page_starts = np.cumsum([0, *map(len, pages[:-1])])
        page = self.to_device(np.repeat(page_starts, counts)) + at // STASH_PAGE
        rows = self.to_device(np.concatenate(pages)).index_select(0, page)
        return rows * STASH_PAGE + at % STASH_PAGE

    def batch(
        self,
        indices: np.ndarray,
        counts: np.ndarray,
        ends: np.ndarray,
        positions: Tensor,
        first: int,
        block_tables: Sequence[Tensor],
    ) -> tuple[SelectedBatch, dict[str, Tensor]]:
        """A pass whose rows are entries [end - count, end) of each prompt, and slots by layer."""
        here = self.to_device(indices)
        tables = tuple(
            table.index_select(0, here) if self.group_segments[group] >= first else table
            for group, table in enumerate(block_tables)
        )
        piece_of = self.to_device(np.repeat(np.arange(len(counts)), counts))
        entry = self.to_device(
            np.concatenate([np.arange(e - n, e) for n, e in zip(counts, ends, strict=True)])
        )
        slots = torch.empty(len(tables), len(entry), dtype=torch.int64, device=self.device)
        slot_mapping: dict[str, Tensor] = {}
        for group, size in enumerate(self.block_sizes):
            if self.group_segments[group] < first:
                continue
            block = tables[group][piece_of, entry // size].long()
            slots[group] = block * size + entry % size
            slot_mapping.update(dict.fromkeys(self.layer_names[group], slots[group]))
        return SelectedBatch(indices, counts, ends, positions, tables, slots), slot_mapping

    def _selected_taps(
        self,
        pieces: Sequence[Piece],
        counts: np.ndarray,
        first: int,
        block_tables: Sequence[Tensor],
    ) -> list[SegmentTap | None] | None:
        """Retention above the selection; every window is in one pass."""
        num_segments = max(self.group_segments) + 1
        taps: list[SegmentTap | None] = [None] * num_segments
        row_ends = np.cumsum(counts)
        for segment in range(first, num_segments):
            prompts = []
            for piece, end in zip(pieces, row_ends.tolist(), strict=True):
                state = piece.chunk.state
                storage = state.storages[segment]
                if piece.is_last and storage.compacts and not state.by_block:
                    prompts.append(
                        Prompt(
                            req_id=state.req_id,
                            batch_index=piece.chunk.batch_index,
                            num_keys=storage.rows,
                            window=state.window,
                            kernel=state.kernel,
                            first_row=end - state.window,
                            slot=None,
                            cap=storage.kept,
                            per_layer=state.per_layer,
                        )
                    )
            taps[segment] = SegmentTap.of(prompts, block_tables, self.taps)
        return taps if any(tap is not None for tap in taps) else None

    def to_device(self, values: np.ndarray) -> Tensor:
        return async_tensor_h2d(values.astype(np.int64, copy=False), device=self.device)
