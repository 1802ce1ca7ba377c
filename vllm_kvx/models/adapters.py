"""Which LoRA adapter each row of a pass has.

vLLM maps all rows of a step to their adapters once, before the forward pass, and its LoRA layers
take the first rows of that mapping. A pass has rows of its own, and so has what projects the
entries of a layer. Rows come request by request, and how many each request has is known on the
host. So the mapping is made there and copied into the buffers that the LoRA layers read: nothing
waits for the device, whereas vLLM's own way reads back which adapters there are.
"""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvx.models.passes import RequestRows

# The place of a request's adapter that has none.
NO_ADAPTER = -1


class AdapterRows:
    """The buffers in which a model's LoRA layers find the adapter of each row.

    A place is that of an adapter's weights among those on the device, `NO_ADAPTER` for none.
    """

    def __init__(self, manager: Any) -> None:
        """manager: vLLM's LoRA manager of a model."""
        key = manager.mm_mapping.language_model[0] if manager.supports_mm else None
        self._manager = manager
        self._wrapper = manager.punica_wrapper_mapping[key or DEFAULT_LANGUAGE_WRAPPER_KEY]

    @classmethod
    def of(cls, model: Any) -> "AdapterRows | None":
        """Those of a model; None if it has no LoRA layers."""
        manager = getattr(model, "lora_manager", None)
        return None if manager is None else cls(manager)

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """(R,) int32 places of adapters by vLLM's numbers of them, (R,), 0 for none."""
        place_of = {number: i for i, number in enumerate(self._manager.lora_index_to_id)}
        places = [place_of[number] if number else NO_ADAPTER for number in numbers.tolist()]
        return np.array(places, dtype=np.int32)

    @contextmanager
    def none(self, count: int) -> Iterator[None]:
        """Inside, `count` rows have no adapter. Waits for the device."""
        with self._instead(np.full(count, NO_ADAPTER, dtype=np.int32)):
            yield

    @contextmanager
    def first(self, count: int) -> Iterator[None]:
        """Inside, the first `count` rows of the step are all that there are. Waits for the device.

        Of a step in which every row has the adapter that vLLM gave it.
        """
        with self._instead(self._mapped()[:count]):
            yield

    @contextmanager
    def _instead(self, places: np.ndarray) -> Iterator[None]:
        # Before the first step nothing is mapped, and whatever is here vLLM writes over.
        before = self._mapped() if self._wrapper.indices_len[0] is not None else None
        self.write(places)
        try:
            yield
        finally:
            if before is not None:
                self.write(before)

    def _mapped(self) -> np.ndarray:
        mapped: Tensor = self._wrapper.token_lora_indices
        return mapped.cpu().numpy().astype(np.int32)

    def write(self, places: np.ndarray) -> None:
        """Maps the next rows that LoRA layers see to adapters at `places`, (N,) int32."""
        count, wrapper = len(places), self._wrapper
        # Of embeddings, all adapters' are in one table.
        embeddings = np.maximum(places, 0) * np.int32(self._manager.vocab_size)
        meta = getattr(wrapper, "token_mapping_meta", None)
        parts = [places, embeddings]
        if meta is not None:
            parts += [np.argsort(places, kind="stable"), *self._counted(places)]
        device = wrapper._token_lora_indices.device
        one = async_tensor_h2d(np.concatenate(parts).astype(np.int32, copy=False), device=device)
        mapped, embedded, *rest = one.split([len(part) for part in parts])
        wrapper._token_lora_indices[:count].copy_(mapped)
        wrapper._embeddings_indices[:count].copy_(embedded)
        wrapper.indices_len[0] = wrapper.indices_len[3] = count
        if meta is None:
            self._write_runs(places)
            return
        ordered, adapters, counts, starts = rest
        meta.token_lora_mapping[:count].copy_(mapped)
        meta.token_indices_sorted_by_lora_ids[:count].copy_(ordered)
        meta.active_lora_ids.copy_(adapters)
        meta.num_tokens_per_lora.copy_(counts)
        meta.lora_token_start_loc.copy_(starts)
        # These two are on the host.
        meta.no_lora_flag_cpu[0] = bool((places == NO_ADAPTER).all())
        active = len(np.unique(places))
        captured = meta.captured_lora_counts
        if (index := bisect_left(captured, active)) < len(captured):
            active = captured[index]
        meta.num_active_loras_cpu[0] = active

    def _counted(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What vLLM's kernels for GPUs go by: places in order, rows of each, and where they start.

        Padded to the sizes that the buffers have.
        """
        room = self._manager.lora_slots + 1
        found, counts = np.unique(places, return_counts=True)
        adapters, rows = np.full(room, NO_ADAPTER), np.zeros(room, dtype=np.int64)
        starts = np.zeros(room + 1, dtype=np.int64)
        adapters[: len(found)], rows[: len(found)] = found, counts
        starts[1 : 1 + len(found)] = np.cumsum(counts)
        return adapters, rows, starts

    def _write_runs(self, places: np.ndarray) -> None:
        """What the operators for CPUs go by: rows that follow each other under one adapter."""
        wrapper = self._wrapper
        starts = np.flatnonzero(np.diff(places, prepend=np.int32(NO_ADAPTER - 1)))
        counts = np.diff(starts, append=len(places))
        runs = len(starts)
        wrapper._seq_start_locs[:runs].copy_(torch.from_numpy(starts))
        wrapper._seq_lengths[:runs].copy_(torch.from_numpy(counts))
        wrapper._lora_indices_per_batch[:runs].copy_(torch.from_numpy(places[starts]))
        wrapper.batch_size, wrapper.max_length = runs, int(counts.max(initial=0))
        wrapper.token_nums, wrapper.is_prefill = len(places), True
        wrapper.no_lora = bool((places == NO_ADAPTER).all())


class StepAdapters:
    """The adapters of one step's rows, and of those that its passes have."""

    def __init__(self, rows: AdapterRows, places: np.ndarray, counts: np.ndarray) -> None:
        """places: (R,) of each request's adapter. counts: (R,) rows of each in the step."""
        self._rows, self._places, self._counts = rows, places, counts
        # Whose the mapped rows are; None: the whole step's.
        self._mapped: RequestRows | None = None

    def select(self, rows: RequestRows | None) -> None:
        """Maps the rows that LoRA layers see next; None: all rows of the step, as vLLM does."""
        if rows is self._mapped:
            return
        self._mapped = rows
        if rows is None:
            self._rows.write(np.repeat(self._places, self._counts))
        else:
            self._rows.write(np.repeat(self._places[rows.requests], rows.counts))
