"""Prompts whose pivot is found while they run (StructKV's pivot=online).

A chunk runs the layers up to the lowest pivot, and its states wait in the stash. Once the prompt is
in, its window's queries exist, and one layer after the other runs over all of its rows, in passes
of the usual size that read their states from the stash and put them back, until the rule fires.
From there on only the selected rows run. Prompts of one step go through the layers together, each
with the rows that are left of it, so their pivots may differ.

This is the one place where a step waits for the device: which layer is the pivot decides how many
rows the next one has, so three numbers are read after each layer from the lowest pivot on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from vllm_kvx.equations.pivot import transition_is_behind
from vllm_kvx.models.decoder import SegmentedModel
from vllm_kvx.worker.layer_hooks import Prompt, SegmentTap
from vllm_kvx.worker.prefill.chunks import PromptChunk, PromptState, SegmentPlan, pack, plan_chunk
from vllm_kvx.worker.prefill.passes import MetadataOf, PromptPasses

OnPivot = Callable[[PromptState, int], None]


@dataclass
class _Running:
    """A prompt that is in: all its rows run until `kept` says which go on."""

    chunk: PromptChunk
    pages: np.ndarray
    prompt: Prompt
    kept: Tensor | None = field(default=None)

    @property
    def num_rows(self) -> int:
        state = self.chunk.state
        return state.prompt_len if self.kept is None else state.num_propagated


class OnlinePasses:
    """Runs the online prompts of one step after everything else in it.

    chunks: these prompts. row_ends: (R,) end of each request's rows in the batch. block_tables: of
    the batch, by KV group. metadata_of: builds attention metadata. on_pivot: told every pivot.
    """

    def __init__(
        self,
        passes: PromptPasses,
        chunks: Sequence[PromptChunk],
        row_ends: np.ndarray,
        block_tables: Sequence[Tensor],
        num_layers: int,
        metadata_of: MetadataOf,
        on_pivot: OnPivot,
    ) -> None:
        assert passes.stash is not None
        self.passes, self.stash, self.taps = passes, passes.stash, passes.taps
        self.row_ends, self.block_tables = row_ends, block_tables
        self.num_layers, self.metadata_of, self.on_pivot = num_layers, metadata_of, on_pivot
        self._groups: dict[tuple[int, int], list[tuple[PromptChunk, np.ndarray]]] = {}
        for chunk in chunks:
            assert chunk.state.online is not None
            limits = chunk.state.online.lowest, chunk.state.online.highest
            # Read here: on the host the pages may have another owner when the pass runs.
            pages = self.stash.pages(chunk.state.req_id)
            self._groups.setdefault(limits, []).append((chunk, pages))

    def run(
        self, model: SegmentedModel, input_ids: Tensor, positions: Tensor, output: Tensor
    ) -> None:
        """Runs the chunks; the last rows of prompts that are in go into `output` (T, hidden).

        input_ids, positions: (T,) of the batch.
        """
        for (low, high), members in self._groups.items():
            running = self._run_chunks(model, members, low, input_ids, positions)
            if running:
                self._run_rest(model, running, low, high, output)

    def _run_chunks(
        self,
        model: SegmentedModel,
        members: Sequence[tuple[PromptChunk, np.ndarray]],
        low: int,
        input_ids: Tensor,
        positions: Tensor,
    ) -> list[_Running]:
        """Layers 0..low over what the step has of these prompts; those that are in."""
        to_device = self.passes.to_device
        chunks = [chunk for chunk, _ in members]
        indices = np.array([chunk.batch_index for chunk in chunks])
        counts = np.array([chunk.end - chunk.begin for chunk in chunks], dtype=np.int32)
        ends = np.array([chunk.end for chunk in chunks], dtype=np.int32)
        plan, start = SegmentPlan(), 0
        for chunk in chunks:
            plan_chunk(plan, chunk, 0, start)
            start += chunk.end - chunk.begin
        in_batch = [
            np.arange(end - count, end)
            for end, count in zip(self.row_ends[indices], counts, strict=True)
        ]
        rows = to_device(np.concatenate(in_batch))
        at = positions.index_select(0, rows)
        batch, slots = self.passes.batch(indices, counts, ends, at, 0, self.block_tables)
        states = model.run_layers(
            0,
            low + 1,
            input_ids.index_select(0, rows),
            at,
            self.metadata_of(batch, 0),
            slots,
            self.passes.tap(plan, self.block_tables),
        )
        pages = [each for _, each in members]
        self.stash.states.index_copy_(0, self.passes.stash_rows(pages, counts, at), states)
        prompts = {prompt.req_id: prompt for prompt in plan.prompts}
        return [
            _Running(chunk, each, prompts[chunk.state.req_id])
            for chunk, each in members
            if chunk.is_last
        ]

    def _run_rest(
        self,
        model: SegmentedModel,
        running: Sequence[_Running],
        low: int,
        high: int,
        output: Tensor,
    ) -> None:
        """The layers above `low` of prompts that are in."""
        layer = low
        while True:
            for each in running:
                if each.kept is None and (layer == high or self._is_behind(each)):
                    state = each.chunk.state
                    each.kept = self.taps.select_central(each.prompt, state.num_propagated)
                    self.on_pivot(state, layer)
            layer += 1
            if all(each.kept is not None for each in running):
                break
            self._pass(model, running, layer, layer + 1, output)
        self._pass(model, running, layer, self.num_layers, output)

    def _is_behind(self, each: _Running) -> bool:
        """Whether the rule fires after the layers so far; waits for the device."""
        online = each.chunk.state.online
        assert online is not None
        values = torch.stack(self.taps.metrics[each.prompt.req_id]).cpu()
        entropy, sparsity, variance = values.unbind(dim=1)
        return transition_is_behind(entropy, sparsity, variance, online.weights)

    def _pass(
        self,
        model: SegmentedModel,
        running: Sequence[_Running],
        begin: int,
        end: int,
        output: Tensor,
    ) -> None:
        """Layers [begin, end) over the rows that are left, states from and to the stash."""
        sizes = [(each.num_rows, each.chunk.state.window) for each in running]
        for pieces in pack(sizes, self.passes.max_tokens):
            members = [running[i] for i, _, _ in pieces]
            indices = np.array([each.chunk.batch_index for each in members])
            counts = np.array([e - b for _, b, e in pieces], dtype=np.int32)
            ends = np.array([e for _, _, e in pieces], dtype=np.int32)
            at = torch.cat(
                [
                    torch.arange(b, e, device=output.device)
                    if each.kept is None
                    else each.kept[b:e]
                    for each, (_, b, e) in zip(members, pieces, strict=True)
                ]
            )
            rows = self.passes.stash_rows([each.pages for each in members], counts, at)
            batch, slots = self.passes.batch(indices, counts, ends, at, 0, self.block_tables)
            prompts = [
                self._prompt(each, stop - each.chunk.state.window)
                for each, count, stop in zip(members, ends, np.cumsum(counts).tolist(), strict=True)
                if count == each.num_rows
            ]
            states = model.run_layers(
                begin,
                end,
                self.stash.states.index_select(0, rows),
                at,
                self.metadata_of(batch, 0),
                slots,
                SegmentTap.of(prompts, self.block_tables, self.taps),
            )
            if end < self.num_layers:
                self.stash.states.index_copy_(0, rows, states)
                continue
            done = np.flatnonzero(ends == [each.num_rows for each in members])
            last = states.index_select(0, self.passes.to_device(np.cumsum(counts)[done] - 1))
            output.index_copy_(0, self.passes.to_device(self.row_ends[indices[done]] - 1), last)

    @staticmethod
    def _prompt(each: _Running, first_row: int) -> Prompt:
        prompt = replace(each.prompt, first_row=first_row, slot=None)
        if each.kept is None:
            return prompt
        rows = each.num_rows
        cap = min(prompt.cap, rows)
        return replace(prompt, num_keys=rows, cap=cap, decay=None, measures=False)
