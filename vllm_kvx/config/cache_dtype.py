"""The dtype of an engine's KV cache, as its configuration tells."""

from typing import Any

from vllm_kvx.policy.cache_dtype import dtype_name, with_skipped

# vLLM itself skips the first and the last layers of these.
_SKIPS_BY_ITSELF = ("turboquant_", "ultraquant_")


def dtype_of_engine(vllm_config: Any) -> str:
    """The dtype of an engine's KV cache, from vLLM's configuration: `fp8`, `fp8-skip-0-1`.

    vLLM resolves `auto` there, but for checkpoints of llm-compressor only in each attention layer.
    Layers that keep the model's dtype are named with it, where that of the others is another.
    """
    return with_skipped(_of_most_layers(vllm_config), skipped_layers(vllm_config))


def skipped_layers(vllm_config: Any) -> list[str]:
    """What the user has skip a quantized KV cache: numbers of layers, or `sliding_window`.

    Nothing where the cache is not quantized, since no layer differs then.
    """
    skipped: list[str] = vllm_config.cache_config.kv_cache_dtype_skip_layers
    if not skipped:
        return []
    dtype = _of_most_layers(vllm_config)
    if not dtype_name(dtype) or dtype.startswith(_SKIPS_BY_ITSELF):
        return []
    return list(skipped)


def _of_most_layers(vllm_config: Any) -> str:
    dtype = str(vllm_config.cache_config.cache_dtype)
    scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None)
    return "fp8" if dtype == "auto" and scheme is not None else dtype
