"""The LoRA adapters of the rows that layers see, in buffers as vLLM's are on a CPU.

vLLM maps the rows of a step before its forward pass; a pass with rows of its own maps these.
"""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY
from vllm.v1.worker.gpu.input_batch import InputBatch

from simulation.cache import Mismatch
from simulation.live import Ints
from simulation.state import Decoder
from vllm_kvx.models.adapters import NO_ADAPTER
from vllm_kvx.models.passes import AdapterSelection, RequestRows

# Rows that may be mapped, more than a step or a pass has.
_ROOM = 4096


class RowAdapters:
    """Which adapter every row has; what it should have follows from the request that it is of."""

    def __init__(self, config: VllmConfig, decoder: Decoder, rng: random.Random) -> None:
        """decoder: gets an adapter manager if the server has adapters, before any state is made."""
        lora = config.lora_config
        # By slot, the number of the adapter whose weights are there; None without adapters.
        self._slots: list[int | None] | None = None
        self._rng = rng
        if lora is None:
            return
        self._slots = [None] * lora.max_loras
        names = "_token_lora_indices", "_embeddings_indices", "_lora_indices_per_batch"
        names = *names, "_seq_start_locs", "_seq_lengths"
        columns = {name: torch.zeros(_ROOM, dtype=torch.int64) for name in names}
        self._buffers: Any = SimpleNamespace(indices_len=[None] * 5, **columns)
        decoder.lora_manager = SimpleNamespace(
            supports_mm=False,
            punica_wrapper_mapping={DEFAULT_LANGUAGE_WRAPPER_KEY: self._buffers},
            lora_index_to_id=self._slots,
            lora_slots=lora.max_loras,
            vocab_size=0,
        )

    def begin_step(self, adapters: Sequence[int], batch: InputBatch) -> None:
        """adapters: of each request, 0 for none. Puts their weights in slots and maps all rows."""
        if self._slots is None:
            return
        slots = self._slots
        for missing in sorted({*adapters} - {0, *slots}):
            free = [i for i, held in enumerate(slots) if held not in adapters]
            slots[self._rng.choice(free)] = missing
        places = [slots.index(each) if each else NO_ADAPTER for each in adapters]
        # By request state.
        self._place_of = dict(zip(batch.idx_mapping_np.tolist(), places, strict=True))
        self._whole = np.repeat(places, batch.num_scheduled_tokens)
        self._buffers.indices_len[0] = len(self._whole)
        self._buffers._token_lora_indices[: len(self._whole)] = torch.from_numpy(self._whole)
        self._has_runs = False  # These are written with the first rows that a pass maps.

    def follow(self, selection: AdapterSelection | None, has_passes: bool) -> None:
        """A step's own selection, if it has passes.

        Raises:
            Mismatch: its passes would leave the rows of a request's adapter as they are.
        """
        self._selection = selection
        if self._slots is None:
            return
        if has_passes and selection is None and (self._whole != NO_ADAPTER).any():
            raise Mismatch("a step with adapters has passes, which nobody tells of them")

    def select(self, rows: RequestRows | None) -> None:
        """As the decoder asks before it runs layers on these rows."""
        if self._selection is not None:
            self._selection.select(rows)
            self._has_runs |= rows is not None

    def check(self, requests: Ints) -> None:
        """requests: (N,) request states of the rows that a layer sees next.

        Raises:
            Mismatch: a row has another adapter than its request.
        """
        if self._slots is None:
            return
        wanted = np.array([self._place_of[request] for request in requests.tolist()])
        if self._selection is None and (self._whole == NO_ADAPTER).all():
            return  # LoRA layers do nothing in such a step, however many rows there are.
        if not np.array_equal(self._mapped(), wanted):
            raise Mismatch(f"rows of {requests} have adapters in {self._mapped()}, want {wanted}")

    def end_step(self) -> None:
        """vLLM maps the next step only where it is of other rows.

        Raises:
            Mismatch: what is mapped is not the whole step.
        """
        if self._slots is None:
            return
        self.select(None)
        if not np.array_equal(self._mapped(), self._whole):
            raise Mismatch(f"mapped after a step: {self._mapped()}, want {self._whole}")

    def _mapped(self) -> Ints:
        """(N,) places by row.

        Raises:
            Mismatch: the runs, by which vLLM's operators go on a CPU, are of something else.
        """
        buffers = self._buffers
        by_row: Ints = buffers._token_lora_indices[: buffers.indices_len[0]].numpy()
        if self._has_runs:
            runs = buffers.batch_size
            places, counts = buffers._lora_indices_per_batch[:runs], buffers._seq_lengths[:runs]
            if not np.array_equal(np.repeat(places.numpy(), counts.numpy()), by_row):
                raise Mismatch(f"runs of {counts} rows at {places}, by row {by_row}")
        return by_row
