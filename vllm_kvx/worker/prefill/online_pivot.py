"""Prompts whose pivot is found while they run (StructKV's pivot=online).

A chunk runs the layers up to the lowest pivot, and its states wait in the stash. Once the prompt is
in, its window's queries exist, and one layer after the other runs over all of its rows, in passes
of the usual size that read their states from the stash and put them back, until the rule fires.
From there on only the chosen rows run. Prompts of one step go through the layers together, each
with the rows that are left of it, so their pivots may differ.

This is the one place where a step waits for the device: which layer is the pivot decides how many
rows the next one has, so three numbers are read after each layer from the lowest pivot on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from vllm_kvx.equations.pivot import transition_is_behind
from vllm_kvx.models.passes import BatchRows, Pass, RequestRows, Source, Stashed, ToOutput, ToStash
from vllm_kvx.policy.axes import OnlineRule
from vllm_kvx.worker.batch import to_device
from vllm_kvx.worker.prefill.chunks import ChunkPlan, PromptChunk, PromptState
from vllm_kvx.worker.prefill.packing import pack
from vllm_kvx.worker.prefill.scoring import PassPrompt
from vllm_kvx.worker.prefill.selected_passes import PassMaker
from vllm_kvx.worker.prefill.stash import Stash
from vllm_kvx.worker.prefill.step_batch import StepBatch

OnPivot = Callable[[PromptState, int], None]


@dataclass
class _Running:
    """A prompt that is in: all its rows run until `chosen` says which go on."""

    chunk: PromptChunk
    pages: np.ndarray
    prompt: PassPrompt
    chosen: Tensor | None = field(default=None)

    @property
    def count(self) -> int:
        """The number of tokens that go on."""
        assert self.chunk.state.selection is not None
        return self.chunk.state.selection.count

    @property
    def num_rows(self) -> int:
        return self.chunk.state.settles_at if self.chosen is None else self.count


class OnlinePasses:
    """The passes of one step over the prompts that find their pivot, after everything else in it.

    chunks: these prompts. on_pivot: told every pivot.
    """

    def __init__(
        self,
        maker: PassMaker,
        chunks: Sequence[PromptChunk],
        step: StepBatch,
        on_pivot: OnPivot,
    ) -> None:
        self.maker, self.step = maker, step
        self.num_layers, self.on_pivot = maker.num_layers, on_pivot
        self.centrality = maker.memory.centrality
        self._groups: dict[OnlineRule, list[tuple[PromptChunk, np.ndarray]]] = {}
        for chunk in chunks:
            selection = chunk.state.selection
            assert selection is not None and selection.online is not None
            # Read here: on the host the pages may have another owner when the pass runs.
            pages = self.stash.pages(chunk.state.req_id)
            self._groups.setdefault(selection.online, []).append((chunk, pages))

    @property
    def stash(self) -> Stash:
        assert self.maker.stash is not None
        return self.maker.stash

    def __call__(self) -> Iterator[Pass]:
        """The passes; the last rows of prompts that are in go to the output."""
        for rule, members in self._groups.items():
            running = self._running(members)
            yield self._chunks(members, rule.lowest)
            if running:
                yield from self._rest(running, rule)

    def _starts(self, members: Sequence[tuple[PromptChunk, np.ndarray]]) -> list[int]:
        """The first row of each chunk in the pass over all of them."""
        counts = [chunk.end - chunk.begin for chunk, _ in members]
        return (np.cumsum(counts) - counts).tolist()

    def _running(self, members: Sequence[tuple[PromptChunk, np.ndarray]]) -> list[_Running]:
        """The prompts whose last chunk is in the step."""
        return [
            _Running(
                chunk,
                pages,
                chunk.state.in_direct_pass(
                    chunk.batch_index, start, chunk.begin, chunk.splits_window
                ),
            )
            for (chunk, pages), start in zip(members, self._starts(members), strict=True)
            if chunk.is_last
        ]

    def _chunks(self, members: Sequence[tuple[PromptChunk, np.ndarray]], lowest: int) -> Pass:
        """Layers 0..lowest over what the step has of these prompts."""
        maker, step = self.maker, self.step
        chunks = [chunk for chunk, _ in members]
        places = np.array([chunk.batch_index for chunk in chunks])
        counts = np.array([chunk.end - chunk.begin for chunk in chunks], dtype=np.int32)
        ends = np.array([chunk.end for chunk in chunks], dtype=np.int32)
        plan = ChunkPlan()
        for chunk, start in zip(chunks, self._starts(members), strict=True):
            plan.add(chunk, start, lowest + 1)
        in_batch = [
            np.arange(end - count, end)
            for end, count in zip(step.row_ends[places], counts, strict=True)
        ]
        rows = to_device(np.concatenate(in_batch), maker.device)
        at = step.positions.index_select(0, rows)
        work = plan.work(step.block_tables, maker.memory)
        now = self._pass(0, lowest + 1, BatchRows(rows), places, counts, ends, at)
        now.hooks = maker.hooks.during(work)
        targets = maker.stash_rows([pages for _, pages in members], counts, at)
        now.sinks = [ToStash(self.stash.states, targets)]
        return now

    def _rest(self, running: Sequence[_Running], rule: OnlineRule) -> Iterator[Pass]:
        """The layers above the lowest pivot of prompts that are in."""
        layer = rule.lowest
        while True:
            for each in running:
                if each.chosen is None and (layer == rule.highest or self._is_behind(each, rule)):
                    prompt = each.prompt
                    each.chosen = self.centrality.choose(
                        prompt.req_id, prompt.num_keys, prompt.longest, each.count
                    )
                    self.on_pivot(each.chunk.state, layer)
            layer += 1
            if all(each.chosen is not None for each in running):
                break
            yield from self._layers(running, layer, layer + 1)
        yield from self._layers(running, layer, self.num_layers)

    def _is_behind(self, each: _Running, rule: OnlineRule) -> bool:
        """Whether the rule fires after the layers so far; waits for the device."""
        values = torch.stack(self.centrality.metrics[each.prompt.req_id]).cpu()
        entropy, sparsity, variance = values.unbind(dim=1)
        return transition_is_behind(entropy, sparsity, variance, rule.weights)

    def _layers(self, running: Sequence[_Running], first: int, last: int) -> Iterator[Pass]:
        """Layers [first, last) over the rows that are left, states from and to the stash."""
        maker, step = self.maker, self.step
        sizes = [(each.num_rows, each.chunk.state.window) for each in running]
        for pieces in pack(sizes, maker.max_tokens):
            members = [running[i] for i, _, _ in pieces]
            places = np.array([each.chunk.batch_index for each in members])
            counts = np.array([e - b for _, b, e in pieces], dtype=np.int32)
            ends = np.array([e for _, _, e in pieces], dtype=np.int32)
            at = torch.cat(
                [
                    torch.arange(b, e, device=maker.device)
                    if each.chosen is None
                    else each.chosen[b:e]
                    for each, (_, b, e) in zip(members, pieces, strict=True)
                ]
            )
            rows = maker.stash_rows([each.pages for each in members], counts, at)
            row_ends = np.cumsum(counts)
            prompts = [
                self._prompt(each, stop - each.prompt.longest)
                for each, end, stop in zip(members, ends, row_ends.tolist(), strict=True)
                if end == each.num_rows
            ]
            source = Stashed(self.stash.states, rows)
            now = self._pass(first, last, source, places, counts, ends, at)
            now.hooks = maker.hooks_for(prompts, step.block_tables)
            done = np.flatnonzero(ends == [each.num_rows for each in members])
            if last < self.num_layers:
                now.sinks = [ToStash(self.stash.states, rows)]
            elif len(done):
                now.sinks = [
                    ToOutput(
                        to_device(step.row_ends[places[done]] - 1, maker.device),
                        to_device(row_ends[done] - 1, maker.device),
                    )
                ]
            yield now

    def _pass(
        self,
        first: int,
        last: int,
        source: Source,
        places: np.ndarray,
        counts: np.ndarray,
        ends: np.ndarray,
        at: Tensor,
    ) -> Pass:
        maker, step = self.maker, self.step
        batch = maker.batch(places, counts, ends, at, 0, step.block_tables)
        return Pass(
            first,
            last,
            source,
            requests=RequestRows(places, counts),
            positions=at,
            attn_metadata=step.metadata_of(batch, ends, maker.groups_from(0)),
            slot_mapping=maker.slots(batch.slot_mappings, first, last),
        )

    @staticmethod
    def _prompt(each: _Running, first_row: int) -> PassPrompt:
        prompt = replace(each.prompt, first_row=first_row, slot=None)
        if each.chosen is None:
            return prompt
        rows = each.num_rows
        return replace(
            prompt,
            num_keys=rows,
            kept=tuple(min(kept, rows) for kept in prompt.kept),
            select_by=None,
            measures=False,
        )
