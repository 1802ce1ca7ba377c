"""Slots for the weights of LoRA adapters, which a step's requests may have in use."""

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.v1.request import Request


class AdapterSlots:
    """A request begins only if its adapter has a slot beside those of all that run.

    vLLM looks at the requests that get tokens in a step. Under policies that retain, a running one
    may get none, as its prompt waits for a place for its window. Were its slot given away, the next
    step would need more adapters than vLLM has slots for, which ends the engine. One whose last
    token an earlier step samples needs none, as for vLLM.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        lora = vllm_config.lora_config
        # None without adapters.
        self._max_loras = None if lora is None else lora.max_loras
        self._max_model_len = vllm_config.model_config.max_model_len
        self._taken: set[int] = set()
        self._num_seen = 0

    def new_step(self) -> None:
        """vLLM begins to schedule a step."""
        self._taken.clear()
        self._num_seen = 0

    def has_room(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a waiting request may begin.

        running: in vLLM's order; between two calls of a step it only grows.
        """
        if self._max_loras is None or request.lora_request is None:
            return True
        for each in running[self._num_seen :]:
            if each.lora_request is not None and not self._has_had_all_steps(each):
                self._taken.add(each.lora_request.lora_int_id)
        self._num_seen = len(running)
        is_there = request.lora_request.lora_int_id in self._taken
        return is_there or len(self._taken) < self._max_loras

    def _has_had_all_steps(self, request: Request) -> bool:
        """Whether a step under way samples its last token, so that no later one has it.

        Steps are planned ahead then. That is how vLLM's scheduler tells which requests to pass
        over, and holds if all drafts under way are rejected.
        """
        under_way = request.num_output_placeholders
        sure = request.num_computed_tokens + 2 - under_way
        longest = min(request.num_prompt_tokens + request.max_tokens, self._max_model_len)
        return under_way > 0 and sure >= longest
