"""Tokens that are drafted behind prompts, to score their keys with the window's: `lookahead`.

They run in the step that ends a prompt, once its forward pass is queued: one pass of one row for
each such prompt and token, over all entries, greedily. Their entries take slots behind the prompt's
that the scheduler gave for this step alone. Beside the last one's attention keys are scored, and
what stays is moved as it is where nothing is drafted. Neither sampler nor scheduler sees any of it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_kvx.worker.attn_metadata import StepAttention
from vllm_kvx.worker.batch import PassBatch, to_device
from vllm_kvx.worker.draft_rows import RowPass, slots_of
from vllm_kvx.worker.prefill.chunks import PromptChunk
from vllm_kvx.worker.prefill.score_and_move import PassWork, PrefillBuffers
from vllm_kvx.worker.prefill.scoring import WindowRows
from vllm_kvx.worker.prefill.selected_passes import lens_to_device
from vllm_kvx.worker.row_passes import RowPasses


class DraftPass(NamedTuple):
    """One drafted token of each of P prompts.

    rows: (P,) int64, which of the pass before they go on from; None: all of them.
    """

    rows: Tensor | None
    now: RowPass


class Draft:
    """The prompts of a step behind which tokens are drafted.

    places: (P,) int64, of these prompts in the step's batch, ascending.
    """

    def __init__(
        self,
        chunks: Sequence[PromptChunk],
        attn: StepAttention,
        memory: PrefillBuffers,
        block_sizes: Sequence[int],
    ) -> None:
        """chunks: their last ones. block_sizes: tokens of a block, by KV group."""
        self._chunks, self._attn, self._memory = chunks, attn, memory
        self._block_sizes = block_sizes
        self.places = np.array([chunk.batch_index for chunk in chunks], dtype=np.int64)
        self._prompt_lens = np.array([chunk.end for chunk in chunks], dtype=np.int32)
        self._counts = np.array([chunk.state.drafted for chunk in chunks])

    @classmethod
    def of(
        cls,
        chunks: Sequence[PromptChunk],
        attn: StepAttention,
        memory: PrefillBuffers,
        block_sizes: Sequence[int],
    ) -> "Draft | None":
        """The prompts that end in a step's `chunks` with tokens to draft; None if none does."""
        ending = [chunk for chunk in chunks if chunk.is_last and chunk.state.drafted]
        ending.sort(key=lambda chunk: chunk.batch_index)
        return cls(ending, attn, memory, block_sizes) if ending else None

    def passes(self) -> Iterator[DraftPass]:
        """The passes, one after the other: ask for the next one when the one before is queued."""
        before = np.arange(len(self._chunks))
        tables: tuple[Tensor, ...] = ()
        starts = torch.empty(0)
        for number in range(int(self._counts.max())):
            going = np.flatnonzero(self._counts > number)
            rows = None
            if number == 0 or len(going) < len(before):
                device = self._memory.device
                if number:
                    rows = to_device(np.searchsorted(before, going), device)
                places = to_device(self.places[going], device)
                tables = tuple(table.index_select(0, places) for table in self._attn.block_tables)
                starts = to_device(self._prompt_lens[going], device)
            yield self._pass(number, going, rows, tables, starts + number)
            before = going

    def _pass(
        self,
        number: int,
        going: np.ndarray,
        rows: Tensor | None,
        tables: tuple[Tensor, ...],
        positions: Tensor,
    ) -> DraftPass:
        """going: (P,) which of the prompts it is of. positions: (P,) int64 of the tokens."""
        slots = slots_of(positions, tables, self._block_sizes)
        ones = np.ones(len(going), dtype=np.int32)
        batch = PassBatch(self.places[going], ones, positions, tables, slots)
        ends = self._prompt_lens[going] + number + 1
        lens, work = lens_to_device(ends, slots.device), self._work(number, going, tables)
        return DraftPass(rows, RowPass(self._attn, batch, lens, ends, work))

    def _work(self, number: int, going: np.ndarray, tables: tuple[Tensor, ...]) -> PassWork | None:
        """Keeps the tokens' queries; scores and drops where they are a prompt's last ones."""
        states = [self._chunks[i].state for i in going]
        slots, by_policy = [], dict[int, int]()
        for state in states:
            assert state.slot is not None
            slots.append(state.slot)
            by_policy[state.stats_row] = by_policy.get(state.stats_row, 0) + 1
        device = self._memory.device
        windows = WindowRows(
            torch.arange(len(states), device=device),
            to_device(np.array(slots), device),
            to_device(np.array([state.window + number for state in states]), device),
            by_policy,
        )
        ending = [
            state.in_drafted_pass(row, row)
            for row, state in enumerate(states)
            if state.drafted == number + 1
        ]
        return PassWork.of(ending, windows, tables, self._memory)


def run_draft(draft: Draft, passes: RowPasses, hidden: Tensor) -> None:
    """Drafts, scores and drops; all of it is queued on the device, and nothing read back.

    hidden: (P, H) final states of the prompts' last tokens.
    """
    for rows, now in draft.passes():
        states = hidden if rows is None else hidden.index_select(0, rows)
        hidden = passes.run(passes.next_ids(states), now)
