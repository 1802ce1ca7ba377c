"""How many generated tokens of requests that resume run in a step, where layers share a choice.

A layer that reads by an earlier one's choice finds it for as many rows as the worker has room for:
those that decode. A preempted request that resumes runs its generated tokens again, many at once.
"""

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.v1.request import Request, RequestStatus

from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.policy import KVPolicy


class ResumedRows:
    """Clips chunks of requests that resume to the rows for which there is room.

    Every running request has its own share, the rows with which it decodes. The shares that no
    running request has are free for those that resume.

    share: rows of a request that decodes. room: those of a server full of them; None where nothing
    is clipped.
    """

    def __init__(self, settings: KVSettings, config: VllmConfig) -> None:
        self.share = 1 + config.num_speculative_tokens
        most = config.scheduler_config.max_num_seqs * self.share
        # None where every layer chooses for itself, and where some layers keep a state: there a
        # chunk ends where a state is stored.
        limited = settings.layout.retrieving.reuse > 1 and not config.model_config.is_hybrid
        self.room = most if limited else None
        # By id, each with the tokens that it had when it was last seen preempted.
        self._resume: dict[str, tuple[Request, int]] = {}
        self._taken = 0

    def __bool__(self) -> bool:
        return bool(self._resume)

    def new_step(self) -> None:
        """vLLM begins to schedule a step."""
        self._taken = 0
        for request_id, (request, tokens) in list(self._resume.items()):
            if request.status == RequestStatus.PREEMPTED:
                # Tokens of steps that were under way have come since.
                self._resume[request_id] = request, request.num_tokens
            # What is computed does not tell alone: a connector's load counts before it may fail.
            elif request.num_computed_tokens >= tokens and request.num_tokens > tokens:
                del self._resume[request_id]

    def restart(self, request: Request, policy: KVPolicy) -> None:
        """A preempted request."""
        if self.room is not None and policy.retrieve is not None and request.num_output_tokens:
            self._resume[request.request_id] = request, request.num_tokens

    def remove_request(self, request_id: str) -> None:
        self._resume.pop(request_id, None)

    def clip(
        self, request: Request, start: int, num_new_tokens: int, running: Sequence[Request]
    ) -> int:
        """How many of `num_new_tokens` from position `start` on may run in this step.

        running: requests that run, this one among them if it does.
        """
        if self.room is None or request.request_id not in self._resume:
            return num_new_tokens
        runs = request.status == RequestStatus.RUNNING
        end = start + num_new_tokens
        begin = max(start, request.num_prompt_tokens)
        left = max(self.room - (len(running) - runs) * self.share - self._taken, 0)
        rows = min(max(end - begin, 0), left)
        self._taken += max(rows - self.share, 0)
        return min(end, begin + rows) - start
