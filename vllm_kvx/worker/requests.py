"""What the worker keeps of running requests: lengths, gaps, and prompts that are coming in."""

from collections.abc import Iterable

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from vllm_kvx.policy.layout import Layout
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import NO_GAP, IntArray, Storage, skipped_of, storage_of, stored_lens
from vllm_kvx.worker.prefill.chunks import PromptChunk, PromptState
from vllm_kvx.worker.prefill.stash import Stash
from vllm_kvx.worker.rows import ProjectedRows
from vllm_kvx.worker.split_layers import Cuts


class Requests:
    """What the worker keeps of running requests, by request-state index, vLLM's number of each.

    Attributes:
        gap_starts, gap_sizes: (S, R) int32 by KV stage, the gap in force. The host copy is the
            source of truth. grows: (S, R) bool, whether it follows the request's last token.
        row_starts, row_sizes: (D, R) int32 by segment of the decoder, the prompt positions that
            do not run it. projects: (D, R) bool, whether its first layer stores them all the same.
        projects_from: (R,) first layer whose prompt entries are projected, else a number above all.
        prompt_lens: (R,) logical lengths. policy_rows: (R,) rows in the counters.
        prompts: those that are coming in and that a policy changes.
        index: of a request's id.
    """

    def __init__(
        self,
        layout: Layout,
        cuts: Cuts,
        num_layers: int,
        max_num_reqs: int,
        num_windows: int,
        stash: Stash | None,
    ) -> None:
        """cuts: of the decoder. num_windows: room for windows that are split."""
        self.starts, self.num_layers, self.stash = layout.stage_starts, num_layers, stash
        self._stages = layout.stages
        self._split_layers = cuts.split_layers
        # By segment: the layer whose rows it runs, its KV stage, and that of its first layer, if
        # this one is split.
        rows_of = [(first + (first in cuts.split_layers), first) for first in cuts.firsts]
        self._segments = [
            (cut, layout.stage_of(cut), None if cut == first else layout.stage_of(first))
            for cut, first in rows_of
        ]
        shape = (len(self._stages), max_num_reqs)
        self.gap_starts = UvaBackedTensor(shape, dtype=torch.int32)
        self.gap_sizes = UvaBackedTensor(shape, dtype=torch.int32)
        self.grows = np.zeros(shape, dtype=bool)
        self._gaps_changed = True
        self.row_starts = np.zeros((len(self._segments), max_num_reqs), dtype=np.int32)
        self.row_sizes = np.zeros_like(self.row_starts)
        self.projects = np.zeros(self.row_starts.shape, dtype=bool)
        self.projects_from = np.full(max_num_reqs, num_layers)
        self.prompt_lens = np.zeros(max_num_reqs, dtype=np.int32)
        self.policy_rows = np.zeros(max_num_reqs, dtype=np.int64)
        self.index: dict[str, int] = {}
        # Requests whose gaps grow, and those whose prompt entries are projected: few, if any.
        self._growing: set[int] = set()
        # By request, the stages where entries are yet to take the slots of others: see ``Storage``.
        self._turning: dict[int, list[tuple[int, Storage]]] = {}
        self._projecting: set[int] = set()
        self.prompts: dict[int, PromptState] = {}
        self.free_windows = list(range(num_windows))

    def add(
        self,
        index: int,
        req_id: str,
        policy: KVPolicy,
        prompt_len: int,
        block_size: int,
        row: int,
        num_computed: int = 0,
    ) -> bool:
        """Whether another server has computed the prompt, and kept a part of it.

        row: the policy's in the counters. block_size: entries of a KV cache block. num_computed:
        tokens whose entries are there.
        """
        storages = [
            storage_of(policy, prompt_len, start, block_size, self.num_layers, slides)
            for start, slides in self._stages
        ]
        gaps = [storage.prefill for storage in storages]
        self.gap_starts.np[:, index] = [gap.start for gap in gaps]
        self.gap_sizes.np[:, index] = [gap.size for gap in gaps]
        self.grows[:, index] = [gap.grows for gap in gaps]
        if self.grows[:, index].any():
            self._growing.add(index)
        if turning := [(i, s) for i, s in enumerate(storages) if s.turn is not None]:
            self._turning[index] = turning
        self._gaps_changed = True
        # Rows that a score chooses wait for the choice: nothing is stored of them before.
        skipped = [
            by_position if by_position.size else gaps[stage]
            for cut, stage, _ in self._segments
            for by_position in (skipped_of(policy, prompt_len, cut),)
        ]
        self.row_starts[:, index] = [gap.start for gap in skipped]
        self.row_sizes[:, index] = [gap.size for gap in skipped]
        self.projects[:, index] = [
            split is not None and gap not in (NO_GAP, gaps[split])
            for gap, (_, _, split) in zip(skipped, self._segments, strict=True)
        ]
        projects_from = policy.projects_from
        self.projects_from[index] = self.num_layers if projects_from is None else projects_from
        if projects_from is not None:
            self._projecting.add(index)
        prompt = PromptState.of(
            req_id,
            policy,
            prompt_len,
            self.starts,
            storages[: len(self.starts)],
            self.num_layers,
            self._split_layers,
        )
        # A prompt of which a server has kept a part itself never begins behind its end.
        lacks = any(s.changes or s.prefill.size or s.prefill.grows for s in storages)
        is_in = lacks and num_computed >= prompt_len
        if is_in:
            self.compact(index, storages)
        elif prompt is not None:
            prompt.stats_row = row
            if prompt.then is not None:
                prompt.then.stats_row = row
            self.prompts[index] = prompt
            if prompt.waits:
                assert self.stash is not None
                self.stash.take(req_id, prompt_len)
        self.prompt_lens[index] = prompt_len
        self.policy_rows[index] = row
        self.index[req_id] = index
        return is_in

    def remove(self, req_id: str) -> None:
        index = self.index.pop(req_id, None)
        if index is not None:
            self.prompt_is_over(index)
            self._growing.discard(index)
            self._turning.pop(index, None)
            self._projecting.discard(index)

    def end_prompts(self, requests: np.ndarray, chunks: Iterable[PromptChunk]) -> None:
        """Takes back what prompts needed whose last chunk is among those of a step.

        Where retention waits for more tokens, the window's queries stay.

        requests: (R,) of the step's batch.
        """
        for chunk in chunks:
            if not chunk.is_last:
                continue
            index, then = int(requests[chunk.batch_index]), chunk.state.then
            if then is None:
                self.prompt_is_over(index)
                continue
            if self.stash is not None:
                self.stash.release(then.req_id)
            then.slot, self.prompts[index] = chunk.state.slot, then

    def prompt_is_over(self, index: int) -> None:
        """Takes back what a prompt needed while it was coming in."""
        prompt = self.prompts.pop(index, None)
        if prompt is None:
            return
        if self.stash is not None:
            self.stash.release(prompt.req_id)
        if prompt.slot is not None:
            self.free_windows.append(prompt.slot)

    def gaps(self, requests: np.ndarray) -> tuple[IntArray, IntArray]:
        """(S, R) starts and sizes of the gaps of these requests."""
        return self.gap_starts.np[:, requests], self.gap_sizes.np[:, requests]

    def row_gaps(self, requests: np.ndarray) -> tuple[IntArray, IntArray]:
        """(D, R) starts and sizes of what does not run each segment; copies."""
        return self.row_starts[:, requests], self.row_sizes[:, requests]

    def projected(
        self, requests: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> ProjectedRows | None:
        """The prompt rows in a step of these (R,) requests that project entries of later layers.

        Request i of them computes the positions [begins[i], ends[i]). None if there are none.
        """
        if not self._projecting:
            return None
        layers = self.projects_from[requests]
        rows = np.clip(self.prompt_lens[requests] - begins, 0, ends - begins)
        rows[layers == self.num_layers] = 0
        if not rows.any():
            return None
        return ProjectedRows(layers, rows, (rows > 0) & (ends >= self.prompt_lens[requests]))

    def stored_lens(self, requests: np.ndarray, logical_lens: IntArray) -> IntArray:
        """(S, R) stored lengths of these requests at (R,) logical ones."""
        return stored_lens(logical_lens, *self.gaps(requests))

    def compact(self, index: int, storages: list[Storage]) -> None:
        """Puts the gaps in force that hold once the prompt is in."""
        for stage, storage in enumerate(storages):
            self.gap_starts.np[stage, index] = storage.decode.start
            self.gap_sizes.np[stage, index] = storage.decode.size
        self._gaps_changed = True

    def turn_gaps(self, requests: np.ndarray, begins: np.ndarray) -> None:
        """Brings gaps to a step of these requests, which begins at (R,) positions `begins`."""
        if not self._turning:
            return
        for index, begin in zip(requests.tolist(), begins.tolist(), strict=True):
            turning = self._turning.get(index, ())
            past = [each for each in turning if each[1].turn is not None and begin >= each[1].turn]
            for stage, storage in past:
                self.gap_starts.np[stage, index] = storage.decode.start
                self.gap_sizes.np[stage, index] = storage.decode.size
                self._gaps_changed = True
            if len(past) == len(turning):
                self._turning.pop(index, None)

    @property
    def has_growing_gaps(self) -> bool:
        """Whether a gap of any request grows."""
        return bool(self._growing)

    def grow_gaps(self, requests: np.ndarray, ends: np.ndarray) -> None:
        """Brings gaps that grow to a step of these requests, whose last tokens end at (R,) `ends`.

        Only the last token of a request runs above the gap's first layer. Those before it in the
        step, after preemption, have been answered, and nothing reads their entries.
        """
        grows = self.grows[:, requests]
        if not grows.any():
            return
        starts, sizes = self.gaps(requests)
        sizes = np.where(grows, np.maximum(sizes, ends - 1 - starts), sizes)
        self.gap_sizes.np[:, requests] = sizes
        stages = [stage for _, stage, _ in self._segments]
        rows = self.row_sizes[:, requests]
        self.row_sizes[:, requests] = np.where(grows[stages], sizes[stages], rows)
        self._gaps_changed = True

    def copy_gaps(self) -> None:
        """Brings the gaps to the device, if any changed."""
        if self._gaps_changed:
            self._gaps_changed = False
            self.gap_starts.copy_to_uva()
            self.gap_sizes.copy_to_uva()

    def chunks(
        self, requests: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> list[PromptChunk]:
        """The chunks of `prompts` in a step of these requests, positions [begin, end) each."""
        chunks = []
        for i, index in enumerate(requests.tolist() if self.prompts else ()):
            prompt = self.prompts.get(index)
            if prompt is None:
                continue
            chunk = PromptChunk(prompt, i, int(begins[i]), int(ends[i]))
            assert chunk.end <= prompt.settles_at, "a chunk crosses the end of its prompt"
            if chunk.splits_window and prompt.slot is None:
                prompt.slot = self.free_windows.pop()
            chunks.append(chunk)
        return chunks

    def has_prompt(self, requests: np.ndarray, begins: np.ndarray) -> bool:
        """Whether one of these requests has a prompt that is coming in and needs more than rows.

        Only prompts whose entries change, are scored or are projected do.

        begins: (R,) computed tokens of each.
        """
        if self.prompts and any(i in self.prompts for i in requests.tolist()):
            return True
        return self._projects_some(requests, begins)

    def only_wait(self, requests: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> bool:
        """Whether prompts of these requests do no more in a step than wait for generated tokens.

        Each is in, and its step not the last before it settles: queries are kept, nothing else.

        begins, counts: (R,) computed tokens of each, and those in the step.
        """
        each = zip(requests.tolist(), begins.tolist(), (begins + counts).tolist(), strict=True)
        for index, begin, end in each:
            prompt = self.prompts.get(index)
            if prompt is None:
                continue
            if begin < self.prompt_lens[index] or end >= prompt.settles_at:
                return False
        return not self._projects_some(requests, begins)

    def _projects_some(self, requests: np.ndarray, begins: np.ndarray) -> bool:
        """Whether prompts of these requests are coming in and project entries."""
        if not self._projecting:
            return False
        is_coming = begins < self.prompt_lens[requests]
        return bool((is_coming & (self.projects_from[requests] < self.num_layers)).any())
