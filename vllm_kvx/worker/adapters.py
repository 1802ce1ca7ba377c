"""The LoRA adapters of running requests."""

from collections.abc import Mapping, Sequence
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


class EveryLogit:
    """Maps every logit of a step to its request's adapter.

    vLLM maps one for each request, which is all that there is without drafts: a step that verifies
    some has a logit for each of them and one more. On a GPU those behind the first ones got the
    adapter of another request's output layer, and on a CPU the step failed.

    drafts: by request, what the step to come verifies.
    """

    def __init__(self, lora_state: Any) -> None:
        """lora_state: vLLM's of a runner, which asks this one from now on."""
        self.drafts: Mapping[str, Sequence[int]] = {}
        self._stock = lora_state.make_lora_inputs
        lora_state.make_lora_inputs = self.make_lora_inputs

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: np.ndarray, num_scheduled_tokens: np.ndarray
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[Any]]:
        """vLLM's numbers of adapters by logit and by token, and the adapters."""
        requests, tokens, active = self._stock(req_ids, idx_mapping, num_scheduled_tokens)
        counts = [1 + len(self.drafts.get(request, ())) for request in req_ids]
        return tuple(np.repeat(requests, counts)), tokens, active
