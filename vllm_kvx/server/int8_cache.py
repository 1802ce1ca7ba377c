"""A KV cache of 8-bit integers with a scale for each token and head: what is refused beside it."""

from typing import TYPE_CHECKING

from vllm_kvx.config.cache_dtype import skipped_layers
from vllm_kvx.config.policy_layers import is_mixed
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.cache_dtype import INT8, INT8_CAPABILITY, why_not_over
from vllm_kvx.server.pipeline_checks import in_pipeline
from vllm_kvx.server.start_refusal import (
    BACKEND,
    CACHE_DTYPE,
    CONNECTOR,
    DRAFTS,
    MODEL,
    Refusal,
    asked_backend,
    asked_connector,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OTHER = "set another --kv-cache-dtype"


def is_int8(c: "VllmConfig") -> bool:
    """Whether most layers have such a cache."""
    return bool(c.cache_config.cache_dtype == INT8)


# Where policies run over such a cache.
OVER_INT8: tuple[Refusal, ...] = (
    Refusal(
        lambda _: _is_older_gpu(),
        f"a KV cache of {INT8} needs a GPU of compute capability "
        f"{'.'.join(map(str, INT8_CAPABILITY))} or later, and this one is older: {_OTHER}",
        CACHE_DTYPE,
    ),
    Refusal(
        lambda c: asked_backend(c) is not None,
        f"a KV cache of {INT8} is read by an attention backend of vllm-kvx's own: drop "
        f"--attention-backend, or {_OTHER}",
        BACKEND,
    ),
    Refusal(
        asked_connector,
        f"KV connectors were never tried over {INT8}, whose scales they would leave behind: drop "
        f"--kv-transfer-config and --kv-offloading-size, or {_OTHER}",
        CONNECTOR,
    ),
    Refusal(
        lambda c: c.speculative_config,
        f"drafted tokens were never tried over {INT8}: drop --speculative-config, or {_OTHER}",
        DRAFTS,
    ),
    Refusal(
        in_pipeline,
        f"a pipeline was never tried over {INT8}: set --pipeline-parallel-size 1 and use "
        f"--tensor-parallel-size, or {_OTHER}",
    ),
    Refusal(
        lambda c: is_mixed(c.model_config),
        "some layers of this model slide over a window or keep a state, beside which policies were "
        f"never tried over {INT8}: {_OTHER}",
        MODEL,
    ),
    Refusal(
        lambda c: _is_cpu() and skipped_layers(c),
        f"vLLM's CPU attention takes layers that skip a cache of {INT8} for such of fp8: drop "
        "--kv-cache-dtype-skip-layers",
        CACHE_DTYPE,
    ),
    Refusal(
        lambda _: _is_batch_invariant(),
        f"attention over {INT8} depends on what else a batch has: unset VLLM_BATCH_INVARIANT, or "
        f"{_OTHER}",
    ),
)

# Where `full` alone is served, by vLLM's own code.
FULL_OVER_INT8: tuple[Refusal, ...] = (
    Refusal(
        lambda c: is_int8(c) and _is_cpu(),
        f"vLLM's CPU attention has no KV cache of {INT8}, and vLLM does not check it: drop "
        "--kv-cache-dtype",
        CACHE_DTYPE,
    ),
)


def beside_int8(settings: KVSettings) -> list[str]:
    """The policies of a server with such a cache that do not run over it."""
    found = {str(policy): why_not_over(INT8, policy) for policy in settings.policies}
    return [
        f"{policy} {why}: serve full, fier and quest alone, or {_OTHER}"
        for policy, why in found.items()
        if why is not None
    ]


def _is_batch_invariant() -> bool:
    import vllm.envs

    return bool(vllm.envs.VLLM_BATCH_INVARIANT)


def _is_older_gpu() -> bool:
    """Whether FlashAttention does not run here; vLLM asks the driver, without touching CUDA."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()  # None on a CPU.
    return capability is not None and tuple(capability) < INT8_CAPABILITY


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
