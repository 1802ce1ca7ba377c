"""Configurations of tiny models, made without starting an engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes a config.json, Llama's with `changes`, and returns its directory."""

    def write(**changes: Any) -> str:
        directory: Path = tmp_path_factory.mktemp("model")
        (directory / "config.json").write_text(json.dumps(LLAMA | changes))
        return str(directory)

    return write


@pytest.fixture(scope="session")
def llama(model_dir: Callable[..., str]) -> str:
    return model_dir()


@pytest.fixture(scope="session")
def engine_args() -> Callable[..., dict[str, Any]]:
    """Keyword arguments of EngineArgs for a model directory."""

    def make(model: str, **kwargs: Any) -> dict[str, Any]:
        return {
            "model": model,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "enforce_eager": True,
            "max_model_len": 512,
        } | kwargs

    return make


@pytest.fixture
def make_config(llama: str, engine_args: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Creates a VllmConfig as a server would: make_config(policy, **engine arguments)."""
    from vllm.engine.arg_utils import EngineArgs

    def make(policy: Any = None, *, model: str = llama, **kwargs: Any) -> Any:
        config = dict(kwargs.pop("additional_config", {}))
        if policy is not None:
            config["kv_policy"] = policy
        args = EngineArgs(**engine_args(model, additional_config=config, **kwargs))
        return args.create_engine_config()

    return make
