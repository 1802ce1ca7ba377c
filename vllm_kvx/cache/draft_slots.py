"""Slots behind a request's tokens, for those that the model drafts for itself."""

from typing import Any

from vllm.config import VllmConfig

from vllm_kvx.config.drafts import DRAFTS_KEY


def reserve_slots() -> None:
    """Has vLLM's scheduler and warm-up leave room for as many tokens as are drafted.

    They ask the configuration, which knows the methods of vLLM's whose drafts have entries. Safe to
    run again.
    """
    stock: Any = VllmConfig.num_lookahead_tokens
    if stock.fget.__module__ == __name__:
        return

    @property  # type: ignore[misc]
    def num_lookahead_tokens(self: VllmConfig) -> int:
        config = self.additional_config
        if isinstance(config, dict) and config.get(DRAFTS_KEY) is not None:
            return self.num_speculative_tokens
        return int(stock.fget(self))

    VllmConfig.num_lookahead_tokens = num_lookahead_tokens  # type: ignore[method-assign]
