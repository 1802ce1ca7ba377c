"""What a policy holds on the device beside the weights, while vLLM sleeps."""

import torch
from torch import Tensor

from vllm_kvx.worker.model_state import PolicyModelState


class SleepingBuffers:
    """Copies on the host, while vLLM sleeps, of what it may discard with the weights.

    Sleep of level 2 discards all memory that was taken while the model loaded, and puts only the
    model's own buffers back. Of the rest these must be as they were: counters, scratch that CUDA
    ops expect to be zero, and what was computed from weights. All else is written before it is
    read.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Tensor, Tensor]] = []

    def save(self, state: PolicyModelState) -> None:
        """Copies the buffers to the host; called before vLLM discards its memory.

        What sleeps already is left alone, as its memory is gone.
        """
        if not self._saved:
            self._saved = [(buffer, buffer.cpu().clone()) for buffer in _kept(state)]

    @torch.inference_mode()
    def restore(self) -> None:
        """Copies the buffers back, once vLLM has mapped the memory of the weights again."""
        for buffer, saved in self._saved:
            buffer.copy_(saved)
        self._saved = []


def _kept(state: PolicyModelState) -> list[Tensor]:
    kept = [state.stored_lens, state.memory.moved]
    kept += [hook.value_factors for hook in state.hooks.layers if hook.value_factors is not None]
    kept += state.hooks.kept
    if state.retrieval is not None:
        kept += state.retrieval.kept_buffers
    return kept
