"""Configurations of servers, made without starting an engine."""

import json
from pathlib import Path
from typing import Any

from vllm_kvx.policy.spec import is_bare, parse_policy, servable

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
# GLM-4.5-Air's, as published.
GLM_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def write_config(directory: Path, **changes: Any) -> str:
    """Writes a config.json, Llama's with `changes`, and returns its directory."""
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    return str(directory)


def served(name: str) -> str:
    """A policy's name as servers take it: a test may leave out how much stays, the paper's rate."""
    return servable(parse_policy(name)) if is_bare(name) else name


def engine_args(model: str, **kwargs: Any) -> dict[str, Any]:
    """Keyword arguments of EngineArgs for a model directory."""
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "max_model_len": 512,
    } | kwargs


def vllm_config(model: str, policy: Any = None, **kwargs: Any) -> Any:
    """A VllmConfig as a server would create it; keywords are arguments of EngineArgs."""
    from vllm.engine.arg_utils import EngineArgs

    config = dict(kwargs.pop("additional_config", {}))
    if policy is not None:
        config["kv_policy"] = policy
    args = EngineArgs(**engine_args(model, additional_config=config, **kwargs))
    return args.create_engine_config()


def speculative(count: int) -> dict[str, Any]:
    """The configuration of speculative decoding that drafts `count` tokens from the text so far."""
    return {
        "method": "ngram",
        "num_speculative_tokens": count,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 3,
    }


def own_drafts(count: int, policy: str = "fier-32", **others: Any) -> dict[str, Any]:
    """That by which the model drafts `count` tokens for itself, in every step unless told."""
    tokens = {"num_speculative_tokens": count}
    return {"method": "kvx", "policy": policy, "cache_to_weights": 0} | tokens | others


def kv_cache_groups(config: Any, specs: dict[str, Any]) -> Any:
    """The KV groups that vLLM forms of layers with these specs."""
    return _kv_cache_planning().get_kv_cache_groups(config, specs)


def planned_kv_cache(config: Any, specs: dict[str, Any], memory: int) -> Any:
    """The KV cache that vLLM plans for one worker with these specs and bytes."""
    planning = _kv_cache_planning()
    # From 0.33 on it is told the groups of all workers.
    groups = getattr(planning, "get_global_kv_cache_groups", None)
    more = [] if groups is None else [groups(config, [specs])]
    (planned,) = planning.get_kv_cache_configs(config, [specs], [memory], *more)
    return planned


def _kv_cache_planning() -> Any:
    """vLLM's module that forms KV groups and sizes the cache; 0.33 moved it."""
    import vllm.v1.core.kv_cache_utils as until_032

    try:
        from vllm.v1.core import kv_cache_planning
    except ImportError:
        return until_032
    return kv_cache_planning
