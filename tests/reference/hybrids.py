"""Tiny random checkpoints of models in which only some layers have full attention.

The others slide over the last `WINDOW` tokens or are recurrent. Weights are drawn as those of
`zoo.py`; `build` has the same signature. Every model has 8 layers and 2 KV heads.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)

from .models import BOS, EOS, OUT_SCALE, QK_SCALE
from .zoo import EXPERTS, HEAD_DIM, HEADS, LAYERS, VOCAB, Entry, draw, write

WINDOW = 64


def pattern(sliding: int, other: str = "sliding_attention") -> list[str]:
    """Layer types: `sliding` layers of one kind below each full one."""
    each = [*[other] * sliding, "full_attention"]
    return (each * LAYERS)[:LAYERS]


_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}
_ONE_IN_FOUR = {"layer_types": pattern(3), "sliding_window": WINDOW}
_ONE_IN_TWO = {"layer_types": pattern(1), "sliding_window": WINDOW}
_DELTA_RULE: dict[str, Any] = {
    "layer_types": pattern(3, "linear_attention"),
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
    },
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}


def _draw_recurrent(name: str, noise: Tensor) -> Tensor | None:
    """What a state forgets: half of it in some five to twenty tokens."""
    if name.endswith("dt_bias"):
        return 0.5 * noise - 2.5
    if name.endswith("A_log"):
        return 0.3 * noise
    if name.endswith(".D"):
        return 1 + 0.2 * noise
    if name.endswith(("linear_attn.norm.weight", "mamba.norm.weight")):
        # Of the state's output: without the one that other norms add.
        return 1 + 0.2 * noise
    if name.endswith("out_proj.weight"):
        return OUT_SCALE * noise / math.sqrt(noise.shape[-1])
    return None


def _draw_gpt_oss(name: str, noise: Tensor) -> Tensor | None:
    """Sinks that weigh as much as keys do, and experts whose weights are (experts, in, out)."""
    if name.endswith("sinks"):
        return 1 + noise
    if name.endswith("router.bias"):
        return 0.1 * noise
    if "experts" in name and not name.endswith("bias"):
        scale = OUT_SCALE if "down_proj" in name else 1.0
        return scale * noise / math.sqrt(noise.shape[-2])
    return None


def _draw_gemma4(name: str, noise: Tensor) -> Tensor | None:
    """Norms of queries and keys that make up for the scale of their products, which is 1."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        scale = QK_SCALE / noise.shape[0] ** 0.25
        return scale * (1 + 0.2 * noise.clamp(-2, 2))
    return None


# By transformers' model type.
HYBRIDS: dict[str, Entry] = {
    "gemma3_text": Entry(
        # The scale is not that of the head size.
        _ONE_IN_FOUR | {"query_pre_attn_scalar": 24, "rope_parameters": _ROPES},
        tied=True,
        is_one_added=True,
        logits_scaling=0.5,
    ),
    # Caps so low that they show.
    "gemma2": Entry(
        _ONE_IN_TWO
        | {
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
        },
        tied=True,
        is_one_added=True,
        logits_scaling=0.5,
    ),
    "gpt_oss": Entry(
        _ONE_IN_TWO
        | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": 64},
        draw=_draw_gpt_oss,
    ),
    # Heads of full layers are larger and fewer, and their values are their keys.
    "gemma4_text": Entry(
        _ONE_IN_FOUR
        | {
            "global_head_dim": 2 * HEAD_DIM,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        },
        tied=True,
        logits_scaling=0.5,
        draw=_draw_gemma4,
    ),
    # Full layers without rotary embeddings, sublayers in parallel.
    "cohere2": Entry(
        _ONE_IN_FOUR | {"logit_scale": 0.25}, derives_head_dim=True, tied=True, logits_scaling=4.0
    ),
    # Full layers without rotary embeddings, norms behind the sublayers.
    "exaone4": Entry(
        _ONE_IN_FOUR | {"sliding_window_pattern": "LLLG"},
        derives_head_dim=True,
    ),
    "olmo3": Entry(_ONE_IN_FOUR, derives_head_dim=True),
    # Gated attention, one full layer in four; with experts, and without.
    "qwen3_next": Entry(
        _DELTA_RULE
        | {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        is_one_added=True,
        draw=_draw_recurrent,
    ),
    "qwen3_5_text": Entry(_DELTA_RULE, is_one_added=True, draw=_draw_recurrent),
    # Short convolutions.
    "lfm2": Entry(
        {
            "layer_types": pattern(1, "conv"),
            "block_auto_adjust_ff_dim": False,
            # What vLLM asks for, and released checkpoints have.
            "conv_dim": HEADS * HEAD_DIM,
            "block_dim": HEADS * HEAD_DIM,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 128,
        },
        derives_head_dim=True,
        tied=True,
        draw=_draw_recurrent,
    ),
    # Mamba 2, and no positions.
    "granitemoehybrid": Entry(
        _MAMBA
        | {
            "layer_types": pattern(3, "linear_attention"),
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.8,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
            "position_embedding_type": "nope",
        },
        derives_head_dim=True,
        logits_scaling=2.0,
        draw=_draw_recurrent,
    ),
    # Mamba 2 or an MLP or attention, each a layer of its own. Experts ("moe") run on GPUs alone.
    "nemotron_h": Entry(
        {
            "layers_block_type": [
                *("linear_attention", "mlp", "full_attention", "linear_attention", "mlp"),
                *("full_attention", "linear_attention", "full_attention"),
            ],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 32,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
        },
        draw=_draw_recurrent,
    ),
}


# Models that also read images, by transformers' model type: the language model, what it has
# besides, and the fields of the whole.
WRAPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma4": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": EXPERTS,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
            },
            "audio_config": None,
            **{f"{each}_token_id": 2 for each in ("image", "boi", "eoi", "audio", "boa", "video")},
        },
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "rope_parameters": {
                **_DELTA_RULE["rope_parameters"],
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            }
        },
        {
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 64,
                "patch_size": 14,
            },
            "image_token_id": VOCAB - 4,
            "video_token_id": VOCAB - 3,
            "vision_start_token_id": VOCAB - 2,
            "vision_end_token_id": VOCAB - 1,
        },
    ),
}


def build(path: str | Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write the float32 model of HYBRIDS entry `name` to `path` and return it.

    `overrides` go to the config class as they are. Raises KeyError for an unknown name.
    """
    return write(path, name, HYBRIDS[name], seed=seed, **overrides)


def wrap(path: Path, name: str, *, seed: int = 0) -> Path:
    """Write the WRAPPED model `name`, which also reads images, to `path` and return it.

    It has no image processor. What stands for an image in a Gemma 4 is a token that no test asks.
    """
    inner, text, others = WRAPPED[name]
    plain = AutoConfig.from_pretrained(build(path / "plain", inner, **text))
    config = AutoConfig.for_model(
        name,
        text_config=plain.to_dict(),
        tie_word_embeddings=plain.tie_word_embeddings,
        dtype="float32",
        **others,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    draw(model, HYBRIDS[inner], seed)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=0)
    model.save_pretrained(path)
    return path


def widen(model: PreTrainedModel) -> PreTrainedModel:
    """The model with vLLM's window of Cohere 2, in place, once: one token more than transformers'.

    vLLM says that a layer of Cohere's sees `sliding_window` tokens and itself. Other models stay as
    they are.
    """
    if model.config.model_type == "cohere2" and not getattr(model, "_is_widened", False):
        model._is_widened = True
        model.config.sliding_window += 1
        for module in model.modules():
            if getattr(module, "sliding_window", None) is not None:
                module.sliding_window += 1
    return model
