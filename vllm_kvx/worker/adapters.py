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
    some has a logit for each of them and one more. On a GPU those behind the first ones would go by
    what an earlier step has left in the mapping, and on a CPU the step fails.

    drafts: by request, what the step to come verifies.
    """

    def __init__(self, lora_state: Any) -> None:
        """lora_state: vLLM's of a runner, which asks this one from now on."""
        self.drafts: Mapping[str, Sequence[int]] = {}
        stock = lora_state.make_lora_inputs

        def make_lora_inputs(req_ids: list[str], *args: Any) -> tuple[Any, Any, Any]:
            # Numbers of adapters by what has a logit and by token, and the adapters.
            requests, tokens, active = stock(req_ids, *args)
            counts = [1 + len(self.drafts.get(request, ())) for request in req_ids]
            return tuple(np.repeat(requests, counts)), tokens, active

        lora_state.make_lora_inputs = make_lora_inputs
