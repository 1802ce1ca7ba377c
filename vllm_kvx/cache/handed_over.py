"""Prompts that one server computes and another goes on with, under policies that keep a part.

The server that prefills hands over what is kept of the prompt, and its first token. The server that
decodes knows the request as one whose prompt is in, with what is kept of it, and that has one
token: as a preempted one that finds all of its entries again. Where it cannot use what was handed
over it computes the prompt itself, and takes nothing.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from vllm_kvx.cache.managers import PolicyKVCacheManager
from vllm_kvx.config.handed_over import FETCHES, HOLDS, KEY, HandedOver, sampling_of
from vllm_kvx.config.quoting import one_line, quoted
from vllm_kvx.policy.policy import KVPolicy

logger = init_logger("vllm.kvx.scheduler")


def is_to_hand_over(request: Request) -> bool:
    """Whether another server is going to fetch the request's blocks."""
    return bool((request.kv_transfer_params or {}).get(HOLDS))


def is_to_fetch(request: Request) -> bool:
    """Whether another server has computed the request's prompt, and nothing of it came yet."""
    return bool((request.kv_transfer_params or {}).get(FETCHES))


class HandedOverPrompts:
    """The requests of one scheduler of whose prompts another server has kept a part."""

    def __init__(self, managers: Sequence[PolicyKVCacheManager], vocab_size: int) -> None:
        """managers: of all KV groups. vocab_size: of the model, which has no other token ids."""
        self._managers, self._vocab_size = managers, vocab_size
        # Those whose entries are still to come, and which have not told their first token.
        self._coming: dict[str, HandedOver] = {}

    def is_coming(self, request: Request) -> bool:
        """Whether entries of the request are still to come."""
        return request.request_id in self._coming

    def add_request(self, request: Request, policy: KVPolicy) -> bool:
        """A new request; whether what another server has kept of its prompt comes.

        Then it has its first token from now on.
        """
        if not is_to_fetch(request) or not self._lacks_entries(request):
            return False
        told = self._told(request, policy)
        if told is None or not self._fits(request):
            logger.warning(
                "Request %s computes its prompt: what another server kept of it cannot be used.",
                quoted(request.request_id),
            )
            return False
        for manager in self._managers:
            kv = manager.requests[request.request_id]
            kv.is_compact = kv.storage.compacts
        request.append_output_token_ids(told.token)
        self._coming[request.request_id] = told
        return True

    def may_load(self, request: Request, policy: KVPolicy) -> bool:
        """Whether a KV connector may bring entries of the request."""
        if self.is_coming(request):
            return True
        if policy.is_lossy_decode and request.num_output_tokens:
            return False  # Entries of its own would come back as a prompt's.
        if not is_to_fetch(request):
            return True
        try:
            told = HandedOver.of(request.kv_transfer_params or {})
        except ValueError:
            return False
        if policy.keeps_prompts:
            return told is None
        # All of such a prompt stays, on both servers.
        return _suits(told, request, policy) and not self._lacks_entries(request)

    def remove_request(self, request_id: str) -> None:
        self._coming.pop(request_id, None)

    def first_tokens(self, scheduler: Scheduler, by_client: dict[int, EngineCoreOutputs]) -> None:
        """Gives requests whose entries have come, or failed to, their first token.

        by_client: a step's outputs, which get these.
        """
        for request_id in [each for each in self._coming if _has_ended(scheduler, each)]:
            told = self._coming.pop(request_id)
            request = scheduler.requests[request_id]
            output = _output_of(scheduler, request, told)
            by_client.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)

    def failed(self, scheduler: Scheduler) -> list[Request]:
        """Requests whose entries did not come, and which wait to compute their prompts."""
        requests = [scheduler.requests[name] for name in scheduler.failed_recving_kv_req_ids]
        failed = [r for r in requests if self._lacks_entries(r)]
        for request in failed:
            request.num_computed_tokens = 0  # No part of what was kept is a prefix.
        return failed

    def _lacks_entries(self, request: Request) -> bool:
        """Whether some layers have fewer entries than tokens once the request's prompt is in."""
        return not all(m.requests[request.request_id].is_stock for m in self._managers)

    def _told(self, request: Request, policy: KVPolicy) -> HandedOver | None:
        """What the other server says, if this one may go on with it."""
        # Of the former the prompt has no end; the latter is told to compute every token.
        if request.resumable or request.get_skip_reading_prefix_cache():
            return None
        try:
            told = HandedOver.of(request.kv_transfer_params or {})
        except ValueError as error:
            logger.warning("%s", one_line(str(error)))
            return None
        if told is None or not _suits(told, request, policy):
            return None
        params, size = request.sampling_params, self._vocab_size
        assert params is not None
        # With `min_tokens` this server never draws it. The request's check does not know yet which
        # tokens end the model's answers.
        if params.min_tokens > 0 and told.token in params.all_stop_token_ids:
            return None
        # A client may have written them. Ids that the model does not have would end the engine.
        is_known = all(0 <= token < size for token in (told.token, *told.logprob_ids))
        return told if is_known and 0 <= told.rank <= size else None

    def _fits(self, request: Request) -> bool:
        """Whether the other server has as many tokens, and as many blocks as entries take."""
        params = request.kv_transfer_params or {}
        by_group = params.get("remote_block_ids") or ()
        is_same = params.get("remote_num_tokens") == request.num_prompt_tokens
        if not is_same or len(by_group) != len(self._managers):
            return False
        for manager in self._managers:
            storage = manager.requests[request.request_id].storage
            entries = storage.stored_len(request.num_prompt_tokens)
            if len(by_group[manager.kv_cache_group_id]) != cdiv(entries, manager.block_size):
                return False
        return True


def tell(
    outputs: Iterable[EngineCoreOutput],
    requests: dict[str, Request],
    policy_of: Callable[[str], KVPolicy],
) -> None:
    """Adds to ``kv_transfer_params`` of a step's outputs what the other server has to know."""
    for output in outputs:
        params, request = output.kv_transfer_params, requests.get(output.request_id)
        if not params or not params.get(FETCHES) or request is None:
            continue
        policy = policy_of(output.request_id)
        # With further tokens, which no request over HTTP may ask for, there is nothing to offer.
        if policy.keeps_prompts or request.num_output_tokens != 1:
            continue
        assert request.sampling_params is not None
        told = HandedOver(
            str(policy),
            int(request.output_token_ids[0]),
            sampling_of(request.sampling_params),
            _adapter_of(request),
            *_as_lists(output.new_logprobs, request.sampling_params.logprobs),
        )
        params[KEY] = told.as_json()


def _as_lists(
    found: LogprobsLists | None, wanted: int | None
) -> tuple[tuple[int, ...], tuple[float, ...], int]:
    """Ids, logprobs and rank of one token; empty where there are none.

    wanted: how many the request asked for beside the token's own, -1 for all. Others in the step
        may have asked for more, which are in the lists then.
    """
    if found is None or wanted is None:
        return (), (), 0
    count = None if wanted == -1 else wanted + 1
    ids, logprobs = found.logprob_token_ids[0][:count], found.logprobs[0][:count]
    return (
        tuple(int(each) for each in ids),
        tuple(float(each) for each in logprobs),
        int(found.sampled_token_ranks[0]),
    )


def _adapter_of(request: Request) -> str | None:
    return None if request.lora_request is None else request.lora_request.lora_name


def _suits(told: HandedOver | None, request: Request, policy: KVPolicy) -> bool:
    """Whether the other server has computed the prompt as this one would."""
    if told is None:
        return False
    return told.policy == str(policy) and told.adapter == _adapter_of(request)


def _has_ended(scheduler: Any, request_id: str) -> bool:
    return request_id in scheduler.finished_recving_kv_req_ids


def _output_of(scheduler: Any, request: Request, told: HandedOver) -> EngineCoreOutput:
    """The output of a request's first token, with which it may end."""
    waits = request.status
    has_ended = check_stop(request, scheduler.max_model_len)
    # A request with a grammar is not fetched before this is there.
    if not scheduler.structured_output_manager.accept_tokens(request, [told.token]):
        logger.error(
            "Request %s ends: its grammar does not allow the first token, %d, which another server "
            "has drawn.",
            quoted(request.request_id),
            told.token,
        )
        request.status, has_ended = RequestStatus.FINISHED_ERROR, True
    status, request.status = request.status, waits
    logprobs = None
    if told.logprob_ids:
        logprobs = LogprobsLists(
            np.array([told.logprob_ids], dtype=np.int32),
            np.array([told.logprobs], dtype=np.float32),
            np.array([told.rank], dtype=np.int32),
        )
    prefill_stats = request.take_prefill_stats()
    if prefill_stats is not None:
        prefill_stats.finalize(scheduler.kv_cache_manager.estimate_cached_tokens(request))
    if scheduler.log_stats:  # It waits no longer, and the first token is not to come before that.
        request.record_event(EngineCoreEventType.SCHEDULED, time.monotonic())
    output = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[told.token],
        new_logprobs=logprobs,
        stop_reason=request.stop_reason,
        events=request.take_events(),
        prefill_stats=prefill_stats,
        trace_headers=request.trace_headers,
    )
    if has_ended:
        scheduler.finish_requests(request.request_id, status)
        output.finish_reason = request.get_finished_reason()
    return output
