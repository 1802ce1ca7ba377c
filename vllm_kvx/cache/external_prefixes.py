"""Prefixes that a KV connector has: what requests may load of them.

Connectors store and load whole prompts' blocks, which are the same under `full` and under policies
that retrieve. What tokens that such a policy generates leave in the cache is another matter: it is
what the answers so far made of it, and no prompt's. So a request that comes back after preemption
loads nothing, and computes these tokens again. What is kept of a prompt under a policy that retains
or propagates is for requests under the same policy alone (``handed_over``).

Requests that skip the prefix cache, as those for ``prompt_logprobs``, load nothing either: vLLM's
scheduler asks the connector and drops the answer. LMCache has to know that, since it goes by its
own answer.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request

from vllm_kvx.config.connectors import LMCACHE


def limit_external_hits(connector: Any, may_load: Callable[[Request], bool]) -> None:
    """Makes a scheduler's connector find nothing for requests that may load nothing.

    may_load: whether the request's policy lets it. Of LMCache those requests load nothing either
        that skip the prefix cache; of other connectors vLLM drops what they find.
    """
    stock = connector.get_num_new_matched_tokens
    is_lmcache = type(connector).__name__ == LMCACHE

    def get_num_new_matched_tokens(request: Request, *args: Any) -> tuple[int | None, bool]:
        is_passed_by = is_lmcache and request.skip_reading_prefix_cache
        if not is_passed_by and may_load(request):
            found: tuple[int | None, bool] = stock(request, *args)
            return found
        if is_lmcache:
            _pass_lmcache_by(connector, request)
        else:  # It is asked all the same, since it may note that the request is there.
            stock(request, *args)
        return 0, False

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens


def _pass_lmcache_by(connector: Any, request: Request) -> None:
    """Has LMCache treat the request as one whose load failed, which computes its prompt.

    LMCache takes what it has found for loaded, and would store what lies behind that before it is
    computed.
    """
    tracker = connector._get_or_create_request_tracker(request)
    tracker.state = type(tracker.state).BYPASS_LMCACHE
