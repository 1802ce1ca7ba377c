"""What else runs on a server, as far as it decides which policies can."""

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_kvx.policy.layout import Layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def on_server(layout: Layout, vllm_config: "VllmConfig") -> Layout:
    """`layout`, with drafted tokens and several ranks where the server has them."""
    drafter = vllm_config.speculative_config
    by_states = drafter is not None and drafter.use_eagle()
    ranks = vllm_config.parallel_config.pipeline_parallel_size
    ahead = drafter is not None and bool(vllm_config.scheduler_config.async_scheduling)
    return replace(
        layout,
        drafts=drafter is not None,
        drafts_ahead=ahead,
        drafts_by_states=by_states,
        pipeline=ranks > 1,
    )
