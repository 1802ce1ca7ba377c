"""Tiny random heads that draft by a model's hidden states: EAGLE, EAGLE-3 and MiMo's MTP layer.

Their weights are drawn as those of ``models``, so that attention is peaked and what a head reads of
its cache decides what it drafts.
"""

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference.models import gain

Kind = Literal["eagle", "eagle3"]
# The states of these many layers of the model are what an EAGLE-3 head takes.
AUXILIARY = 3
_ARCHITECTURES = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}


def build_head(path: Path, model: Path, kind: Kind, *, seed: int = 1) -> Path:
    """Writes an EAGLE or EAGLE-3 head of one layer for a Llama of ``build_model``; returns `path`."""
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    config |= {"num_hidden_layers": 1, "architectures": [_ARCHITECTURES[kind]]}
    is_3 = kind == "eagle3"
    layer = "midlayer" if is_3 else "layers.0"
    shapes = layer_shapes(config, layer, 2 * hidden if is_3 else hidden)
    shapes["fc.weight"] = hidden, (AUXILIARY if is_3 else 2) * hidden
    if is_3:
        config["draft_vocab_size"] = config["vocab_size"]
        shapes["lm_head.weight"] = config["vocab_size"], hidden
        shapes |= {"norm.weight": (hidden,), "midlayer.hidden_norm.weight": (hidden,)}
    else:  # Its first layer takes what `fc` makes as it is.
        del shapes[f"{layer}.input_layernorm.weight"]
    path.mkdir(parents=True, exist_ok=True)
    save_file(drawn(shapes, seed), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def add_mtp(path: Path, model: Path, *, seed: int = 1) -> Path:
    """Writes a MiMo at `path`: a Qwen2 of ``build_model``, with one MTP layer; returns `path`."""
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
    }
    layer = "model.mtp_layers.0"
    shapes = layer_shapes(config, layer, hidden)
    shapes |= {f"{layer}.self_attn.{name}_proj.bias": (shapes[f"{layer}.self_attn.{name}_proj.weight"][0],) for name in "qkv"}
    shapes[f"{layer}.input_proj.weight"] = hidden, 2 * hidden
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        shapes[f"{layer}.{name}.weight"] = (hidden,)
    weights = load_file(model / "model.safetensors")
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights | drawn(shapes, seed), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def layer_shapes(config: dict[str, Any], layer: str, width: int) -> dict[str, tuple[int, ...]]:
    """The weights of a decoder layer whose attention takes `width` channels, by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    return {
        f"{layer}.self_attn.q_proj.weight": (heads * size, width),
        f"{layer}.self_attn.k_proj.weight": (kv_heads * size, width),
        f"{layer}.self_attn.v_proj.weight": (kv_heads * size, width),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads * size),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Random weights of these shapes, by name."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            noise = 1 + 0.2 * noise.clamp(-2, 2)
        elif name.endswith("bias"):
            noise = 0.3 * noise
        else:
            noise = noise * gain(name) / math.sqrt(shape[1])
        weights[name] = noise
    return weights
