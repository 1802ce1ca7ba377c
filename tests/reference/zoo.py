"""Tiny random checkpoints of many architectures, the same bytes for the same name and seed.

Every decoder here has full attention in all layers, dense or MoE. `models.py` builds the four that
most tests use; its docstring says how weights are scaled and why. Routers are scaled so that rows
choose clearly between experts. Models in which only some layers have full attention are in
`hybrids.py`. InternLM3 is not here: transformers 5.19 has no such model.
BailingMoE has none either.

A config must hold no field of another architecture: a Cohere config with `rms_norm_eps` gets RMS
norms in vLLM, and layer norms in transformers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from .models import BIAS_SCALE, BOS, EOS, LOGIT_SCALE, OUT_SCALE, QK_SCALE

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EXPERTS = 8, 4, 2, 32, 512, 4
# Std of a router's logits, its input having unit RMS.
ROUTER_SCALE = 2.0


@dataclass(frozen=True)
class Entry:
    """What an architecture's config gets beside the common fields."""

    fields: dict[str, Any] = field(default_factory=dict)
    # Where the head size is not a field of its own: the hidden size is HEADS * HEAD_DIM.
    derives_head_dim: bool = False
    tied: bool = False
    # Whether a norm multiplies by 1 + weight.
    is_one_added: bool = False
    # What the head's logits are divided by.
    logits_scaling: float = 1.0
    # A weight by its name and unit noise of its shape, or None for what the others get.
    draw: Callable[[str, Tensor], Tensor | None] | None = None


FULL = ["full_attention"] * LAYERS
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Multipliers that differ from 1 and from each other.
_GRANITE = {
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}

# By transformers' model type.
ZOO: dict[str, Entry] = {
    "qwen3_moe": Entry(_MOE | {"num_experts": EXPERTS, "norm_topk_prob": True}),
    "glm4_moe": Entry(
        _MOE
        | {
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
        }
    ),
    "minimax_m2": Entry(
        {
            "num_experts_per_tok": 2,
            "num_local_experts": EXPERTS,
            "intermediate_size": 32,
            "rotary_dim": 16,
            # What the released checkpoint has; transformers always does it, vLLM asks.
            "use_qk_norm": True,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.5,
            },
        }
    ),
    "mixtral": Entry({"num_local_experts": EXPERTS, "intermediate_size": 32}),
    "ernie4_5_moe": Entry(
        {
            "moe_num_experts": EXPERTS,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": LAYERS - 1,
        },
        tied=True,
    ),
    "hy_v3": Entry(
        _MOE
        | {
            "num_experts": EXPERTS,
            "num_shared_experts": 1,
            "qk_norm": True,
            "first_k_dense_replace": 1,
            "route_norm": True,
            "moe_router_enable_expert_bias": True,
            "moe_router_use_sigmoid": True,
            "expert_hidden_dim": 32,
        }
    ),
    "qwen2_moe": Entry(
        _MOE | {"num_experts": EXPERTS, "shared_expert_intermediate_size": 64},
        derives_head_dim=True,
    ),
    "olmoe": Entry(
        {"num_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": 32},
        derives_head_dim=True,
    ),
    "granitemoe": Entry(
        _GRANITE | {"num_local_experts": EXPERTS, "intermediate_size": 32},
        derives_head_dim=True,
        logits_scaling=2.0,
    ),
    "granite": Entry(_GRANITE, derives_head_dim=True, logits_scaling=2.0),
    "phi3": Entry({"original_max_position_embeddings": 1024}, derives_head_dim=True),
    # Embeddings are multiplied by the root of the hidden size: a smaller table keeps a token from
    # being its own likeliest successor.
    "gemma": Entry(tied=True, is_one_added=True, logits_scaling=0.5),
    "cohere": Entry(
        {"logit_scale": 0.25, "use_qk_norm": False},
        derives_head_dim=True,
        tied=True,
        logits_scaling=4.0,
    ),
    "olmo2": Entry(derives_head_dim=True),
    "olmo3": Entry({"layer_types": FULL}, derives_head_dim=True),
    "glm4": Entry(),
    "starcoder2": Entry({"sliding_window": None}, derives_head_dim=True, tied=True),
    # Positions beyond 64 scale queries, as the released checkpoint does beyond 16384.
    "ministral3": Entry(
        {
            "rope_parameters": {
                "type": "yarn",
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            # Where vLLM reads it: checkpoints in Mistral's own format have it there.
            "llama_4_scaling": {"original_max_position_embeddings": 64, "beta": 0.1},
        }
    ),
    "seed_oss": Entry({"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "smollm3": Entry(
        {"no_rope_layers": [1, 1, 1, 0] * (LAYERS // 4), "layer_types": FULL},
        derives_head_dim=True,
        tied=True,
    ),
    "gpt2": Entry({"n_inner": 128}, derives_head_dim=True, tied=True),
    "stablelm": Entry(
        {"partial_rotary_factor": 0.25, "use_qkv_bias": True},
        derives_head_dim=True,
    ),
    "nemotron": Entry(is_one_added=True),
    "exaone4": Entry({"sliding_window": None, "layer_types": FULL}, derives_head_dim=True),
    "ernie4_5": Entry(tied=True),
    "hunyuan_v1_dense": Entry(),
}


def build(path: str | Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write the float32 model of ZOO entry `name` to `path` and return it.

    `overrides` go to the config class as they are. Raises KeyError for a name that is not in ZOO.
    """
    return write(path, name, ZOO[name], seed=seed, **overrides)


def write(path: str | Path, name: str, entry: Entry, *, seed: int = 0, **overrides: Any) -> Path:
    """As `build`, of transformers' model type `name` with any entry."""
    fields: dict[str, Any] = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_size": HEADS * HEAD_DIM if entry.derives_head_dim else 64,
        "intermediate_size": 128,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": entry.tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    if not entry.derives_head_dim:
        fields["head_dim"] = HEAD_DIM
    if name == "gpt2":
        for key in ("num_key_value_heads", "intermediate_size"):
            del fields[key]
    config = AutoConfig.for_model(name, **(fields | entry.fields | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw(model, entry, seed)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=0)
    model.save_pretrained(path)
    return Path(path)


@torch.no_grad()
def draw(model: PreTrainedModel, entry: Entry, seed: int) -> None:
    """Fill every parameter, and the routers' biases, from one generator in the order of names."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(model.named_parameters())
    weights |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("_bias")}
    for name, weight in sorted(weights.items()):
        noise = torch.randn(weight.shape, generator=generator)
        own = entry.draw(name, noise) if entry.draw is not None else None
        if own is not None:
            weight.copy_(own)
        elif name.endswith("bias"):
            # Each row's stream gets the same biases: large ones would make all rows alike.
            is_inside = any(part in name for part in ("q_proj", "k_proj", "v_proj", "correction"))
            weight.copy_((BIAS_SCALE if is_inside else 0.1) * noise)
        elif _is_norm(name):
            scale = QK_SCALE if _is_of_queries(name) else 1.0
            weight.copy_(scale * (1 + 0.2 * noise.clamp(-2, 2)) - float(entry.is_one_added))
        elif "embed_tokens" in name or "wte" in name:
            # A tied table is the head too.
            scale = entry.logits_scaling * LOGIT_SCALE / math.sqrt(weight.shape[1])
            weight.copy_(noise * (scale if entry.tied else 1.0))
        elif "wpe" in name:
            weight.copy_(noise * 0.1)
        else:
            weight.copy_(_projection(name, noise, model.config, entry))


def _projection(name: str, noise: Tensor, config: Any, entry: Entry) -> Tensor:
    """A projection's weight from unit noise; experts' weights are (experts, out, in)."""
    if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) and "transformer.h" in name:
        # GPT-2 stores (in, out).
        weight = noise.T / math.sqrt(noise.shape[0])
    else:
        weight = noise / math.sqrt(noise.shape[-1])
    if "qkv_proj" in name or "c_attn" in name:
        values = HEAD_DIM * getattr(config, "num_key_value_heads", HEADS)
        weight[: len(weight) - values] *= QK_SCALE
    elif "q_proj" in name or "k_proj" in name:
        weight *= QK_SCALE
    elif "lm_head" in name:
        weight *= LOGIT_SCALE * entry.logits_scaling
    elif any(part in name for part in ("o_proj", "down_proj", "c_proj", "dense")):
        weight *= OUT_SCALE
    elif name.endswith(("gate.weight", "router.weight", "wg.weight")):
        weight *= ROUTER_SCALE
    return weight.T if weight.shape != noise.shape or "transformer.h" in name else weight


def _is_norm(name: str) -> bool:
    return "norm" in name or ".ln_" in name


def _is_of_queries(name: str) -> bool:
    return any(part in name for part in ("q_norm", "k_norm", "query_layernorm", "key_layernorm"))
