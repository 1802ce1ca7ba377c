"""Asynchronous scheduling where tokens are drafted."""

from typing import Any

from vllm_kvx.server.validate import is_full_alone


def schedule_in_time(args: Any) -> None:
    """Turns it off in `args`, vLLM's ``EngineArgs``, where tokens are drafted and nobody asked.

    Its speed beside drafts is not measured, and not every policy, cache and model can have it:
    what was asked for is refused later where it cannot be. A server of `full` alone is vLLM's own.
    """
    if not args.speculative_config or args.async_scheduling is not None:
        return
    if is_full_alone(args.additional_config):
        return
    from vllm.logger import init_logger

    args.async_scheduling = False
    init_logger("vllm.kvx").info(
        "Asynchronous scheduling is off: beside drafted tokens and policies its speed is not "
        "measured. --async-scheduling turns it on."
    )
