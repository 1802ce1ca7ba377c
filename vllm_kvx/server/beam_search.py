"""Beam search cannot run under a policy; says so instead of answering something else.

Each of its steps sends a beam's prompt and generated tokens as a new prompt. A policy would then
treat generated tokens as prompt tokens, which none does to those it generates itself. vLLM gives
these requests no ``vllm_xargs`` either, so one cannot ask for ``full``.
"""

from collections.abc import Callable
from typing import Any


def refuse_beam_search(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``InputProcessor.resolve_watermarking``, which both beam searches call first."""

    def resolve_watermarking(self: Any, params: Any) -> Any:
        from vllm.sampling_params import BeamSearchParams

        from vllm_kvx.server.refused import Reason, count_for
        from vllm_kvx.settings import KVSettings

        if isinstance(params, BeamSearchParams):
            settings = KVSettings.from_vllm_config(self.vllm_config)
            if settings is not None and not settings.stock:
                count_for(str(self.vllm_config.model_config.served_model_name))(Reason.BEAM_SEARCH)
                raise ValueError(
                    f"beam search is not supported on a server with KV policy {settings.policy}: "
                    "drop use_beam_search, or use a server without --kv-policy"
                )
        return original(self, params)

    return resolve_watermarking
