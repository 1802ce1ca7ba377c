"""Prefixes that a KV connector has: what requests may load of them.

Connectors store and load whole prompts' blocks, which are the same under `full` and under policies
that retrieve. What tokens that such a policy generates leave in the cache is another matter: it is
what the answers so far made of it, and no prompt's. So a request that comes back after preemption
loads nothing, and computes these tokens again.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request

from vllm_kvx.policy.policy import KVPolicy


def limit_external_hits(connector: Any, policy_of: Callable[[str], KVPolicy]) -> None:
    """Makes a scheduler's connector find nothing for requests that have lossy entries of their own.

    policy_of: a request's policy, by its id.
    """
    stock = connector.get_num_new_matched_tokens

    def get_num_new_matched_tokens(request: Request, *args: Any) -> tuple[int | None, bool]:
        # It is asked all the same, since it may note that the request is there.
        found: tuple[int | None, bool] = stock(request, *args)
        is_lossy = policy_of(request.request_id).is_lossy_decode
        return (0, False) if is_lossy and request.num_output_tokens else found

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
