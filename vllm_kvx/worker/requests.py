"""What the worker keeps of running requests: lengths, gaps, and prompts that are coming in."""

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import IntArray, Storage, storage_of, stored_lens
from vllm_kvx.worker.prefill.chunks import PromptChunk, PromptState
from vllm_kvx.worker.prefill.stash import Stash


class Requests:
    """By request-state index, as vLLM numbers running requests.

    Attributes:
        gap_starts, gap_sizes: (S, R) int32 by KV stage, the gap in force. The host copy is the
            source of truth.
        prompt_lens, seq_lens: (R,) logical lengths. policy_rows: (R,) rows in the counters.
        prompts: those that are coming in and that a policy changes.
        index: of a request's id.
    """

    def __init__(
        self,
        starts: tuple[int, ...],
        num_layers: int,
        max_num_reqs: int,
        num_windows: int,
        stash: Stash | None,
    ) -> None:
        """starts: first layer of every KV stage. num_windows: room for windows that are split."""
        self.starts, self.num_layers, self.stash = starts, num_layers, stash
        shape = (len(starts), max_num_reqs)
        self.gap_starts = UvaBackedTensor(shape, dtype=torch.int32)
        self.gap_sizes = UvaBackedTensor(shape, dtype=torch.int32)
        self._gaps_changed = True
        self.prompt_lens = np.zeros(max_num_reqs, dtype=np.int32)
        self.policy_rows = np.zeros(max_num_reqs, dtype=np.int64)
        self.seq_lens = np.zeros(max_num_reqs, dtype=np.int64)
        self.index: dict[str, int] = {}
        self.prompts: dict[int, PromptState] = {}
        self.free_windows = list(range(num_windows))

    def add(
        self, index: int, req_id: str, policy: KVPolicy, prompt_len: int, block_size: int, row: int
    ) -> None:
        """row: the policy's in the counters. block_size: entries of a KV cache block."""
        for stage, start in enumerate(self.starts):
            storage = storage_of(policy, prompt_len, start, block_size, self.num_layers)
            self.gap_starts.np[stage, index] = storage.prefill.start
            self.gap_sizes.np[stage, index] = storage.prefill.size
        self._gaps_changed = True
        prompt = PromptState.of(
            req_id, policy, prompt_len, self.starts, block_size, self.num_layers
        )
        if prompt is not None:
            prompt.stats_row = row
            self.prompts[index] = prompt
            if prompt.waits:
                assert self.stash is not None
                self.stash.take(req_id, prompt_len)
        self.prompt_lens[index], self.seq_lens[index] = prompt_len, 0
        self.policy_rows[index] = row
        self.index[req_id] = index

    def remove(self, req_id: str) -> None:
        index = self.index.pop(req_id, None)
        if index is not None:
            self.prompt_is_over(index)

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

    def stored_lens(self, requests: np.ndarray, logical_lens: IntArray) -> IntArray:
        """(S, R) stored lengths of these requests at (R,) logical ones."""
        return stored_lens(logical_lens, *self.gaps(requests))

    def compact(self, index: int, storages: list[Storage]) -> None:
        """Puts the gaps in force that hold once the prompt is in."""
        for stage, storage in enumerate(storages):
            self.gap_starts.np[stage, index] = storage.decode.start
            self.gap_sizes.np[stage, index] = storage.decode.size
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
            assert chunk.end <= prompt.prompt_len, "a chunk crosses the end of its prompt"
            if chunk.splits_window and prompt.slot is None:
                prompt.slot = self.free_windows.pop()
            chunks.append(chunk)
        return chunks

    def has_prompt(self, requests: np.ndarray) -> bool:
        """Whether one of these requests has a prompt that is coming in."""
        return bool(self.prompts) and any(i in self.prompts for i in requests.tolist())
