"""The LoRA adapters of running requests."""

from typing import Any

import numpy as np

from vllm_kvx.models.adapters import AdapterRows, StepAdapters
from vllm_kvx.worker.step import Step


class Adapters:
    """By request-state index, vLLM's number of the request's adapter; 0 is none."""

    def __init__(self, model: Any, max_num_reqs: int) -> None:
        self._rows = AdapterRows.of(model)
        self._numbers = np.zeros(max_num_reqs, dtype=np.int64)

    def add_request(self, index: int, lora_request: Any) -> None:
        self._numbers[index] = 0 if lora_request is None else lora_request.lora_int_id

    def of_step(self, step: Step) -> StepAdapters | None:
        """Once vLLM has mapped its rows; None if no request in it has an adapter."""
        numbers = self._numbers[step.requests]
        if self._rows is None or not numbers.any():
            return None
        return StepAdapters(self._rows, self._rows.places(numbers), step.counts)
