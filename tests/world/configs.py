"""Configurations of servers, made without starting an engine."""

import json
from pathlib import Path
from typing import Any

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


def write_config(directory: Path, **changes: Any) -> str:
    """Writes a config.json, Llama's with `changes`, and returns its directory."""
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    return str(directory)


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
