"""The dtype of an engine's KV cache, as its configuration tells."""

from typing import Any


def dtype_of_engine(vllm_config: Any) -> str:
    """The dtype of an engine's KV cache, from vLLM's configuration.

    vLLM resolves `auto` there, but for checkpoints of llm-compressor only in each attention layer.
    """
    dtype = str(vllm_config.cache_config.cache_dtype)
    scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None)
    return "fp8" if dtype == "auto" and scheme is not None else dtype
