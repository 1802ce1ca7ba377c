"""How many bytes a model's weights take, by its files or by its configuration."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kvx.records.model_key import weight_files
from vllm_kvx.tools.experts import Experts

INDEX = "model.safetensors.index.json"
# Bytes of a weight where the server quantizes as it loads, by the beginning of --quantization.
_ONLINE = {"fp8": 1.0, "mxfp8": 1.0, "mxfp4": 0.53}


def weights_bytes(
    directory: Path,
    config: Mapping[str, Any],
    served_bytes: int,
    quantization: str | None = None,
) -> tuple[int, str]:
    """About how many bytes the weights take on all GPUs together, and what says so.

    served_bytes: of one weight as it is served, unless they are quantized.
    quantization: the server's, where it quantizes weights that are stored plain.
    """
    stored = element_bytes(config)
    each: float = served_bytes
    if config.get("quantization_config"):
        each, scale = quantized_bytes(config), 1.0
    else:
        found = (size for name, size in _ONLINE.items() if (quantization or "").startswith(name))
        each = next(found, each)
        scale = each / stored if stored else 1.0
    if files := weight_files(directory):
        return int(sum(path.stat().st_size for path in files) * scale), "by their files"
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        return int(index["metadata"]["total_size"] * scale), "by their index"
    except (OSError, ValueError, KeyError, TypeError):
        tables, rest = _parameters(config)
        # Embeddings and the head stay as they are.
        return int(tables * served_bytes + rest * each), "counted from the configuration"


def element_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of a weight as the checkpoint has it; 0 if it does not say."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(name, 0)


def quantized_bytes(config: Mapping[str, Any]) -> float:
    """Bytes of a quantized weight of a checkpoint, without its scales; 2 where that is not known.

    Of compressed-tensors the first group of layers is taken.
    """
    quantized: Mapping[str, Any] = config["quantization_config"]
    for group in (quantized.get("config_groups") or {}).values():
        quantized = (group or {}).get("weights") or quantized
        break
    bits = quantized.get("num_bits") or quantized.get("bits") or quantized.get("w_bit")
    if not isinstance(bits, int):
        method = str(quantized.get("quant_method"))
        bits = 8 if "fp8" in method else 4 if "fp4" in method or method == "awq" else 16
    return bits / 8


def _parameters(config: Mapping[str, Any]) -> tuple[int, int]:
    """Weights of the tables of tokens, and of all layers, of a decoder of this configuration."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    dense = 3 * hidden * config.get("intermediate_size", 4 * hidden)
    mlps = layers * dense
    if experts := Experts.of(config):
        each = 3 * hidden * (experts.count * experts.size + experts.shared)
        each += hidden * experts.count
        first = min(experts.dense_layers, layers)
        mlps = first * dense + (layers - first) * each
    tables = (1 if config.get("tie_word_embeddings") else 2) * config.get("vocab_size", 0) * hidden
    return int(tables), int(layers * attention + mlps)
