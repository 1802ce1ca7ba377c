"""Beam search cannot run under a policy; says so instead of answering something else.

Each of its steps sends a beam's prompt and generated tokens as a new prompt. A policy would then
treat generated tokens as prompt tokens, which none does to those it generates itself. vLLM gives
these requests no ``vllm_xargs`` either, so one cannot ask for ``full``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refuse_beam_search(vllm_config: "VllmConfig", params: Any) -> None:
    """Refuses a request with `params` if it is a beam search, and the engine has a policy.

    Raises:
        ValueError: both is so.
    """
    from vllm.sampling_params import BeamSearchParams

    from vllm_kvx.config.settings import KVSettings
    from vllm_kvx.server.refusal_reasons import Reason, count_for

    if not isinstance(params, BeamSearchParams):
        return
    settings = KVSettings.from_vllm_config(vllm_config)
    if settings is not None and not settings.stock:
        count_for(str(vllm_config.model_config.served_model_name))(Reason.BEAM_SEARCH)
        raise ValueError(
            f"beam search is not supported under KV policy {settings.policy}: sample, which over "
            "HTTP means to drop use_beam_search, or use an engine without a KV policy"
        )
