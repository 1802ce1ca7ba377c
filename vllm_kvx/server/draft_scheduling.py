"""Asynchronous scheduling where tokens are drafted, which not every policy can have."""

from typing import Any

from vllm_kvx.config.settings import LAYOUT_KEY, POLICY_KEY
from vllm_kvx.policy.auto import is_auto
from vllm_kvx.policy.beside_server import beside_drafts_ahead
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy


def schedule_in_time(args: Any) -> None:
    """Turns it off in `args`, vLLM's ``EngineArgs``, for such policies if nobody asked for it.

    What was asked for is refused later, with the reason. A name that says nothing yet, `auto` or
    one that does not parse, is taken for such a policy.
    """
    config = args.additional_config
    if not args.speculative_config or args.async_scheduling is not None:
        return
    layout = config.get(LAYOUT_KEY)
    # What is no list is refused later.
    layout = layout if isinstance(layout, (list, tuple)) else ()
    for name in filter(None, [config.get(POLICY_KEY), *layout]):
        why = _why(name)
        if why is not None:
            from vllm.logger import init_logger

            args.async_scheduling = False
            init_logger("vllm.kvx").info("Asynchronous scheduling is off: %s", why)
            return


def _why(name: Any) -> str | None:
    """Why a policy of this name cannot have it beside drafts; None if it can."""
    if not isinstance(name, str) or is_auto(name):
        return f"what {name} stands for may wait for generated tokens (after=)"
    try:
        problem = beside_drafts_ahead(parse_policy(name))
    except PolicyError:
        return f"{name} is no policy"
    return None if problem is None else problem.rpartition(": set ")[0]
