"""The dimensions of models that are measured with random weights."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from vllm_kvx.tools.ideal.shape import Shape

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_QWEN3_NEXT = {
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_GLM_AIR = {
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": False,
    "rms_norm_eps": 1e-5,
}
SHAPES: dict[str, Shape] = {
    "llama-3.1-8b": Shape(
        "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, extra={"rope_scaling": _LLAMA3_ROPE}
    ),
    "qwen2.5-7b": Shape(
        "qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 131072, 1e6, {"rms_norm_eps": 1e-6}
    ),
    "qwen2.5-14b": Shape(
        "qwen2", 48, 5120, 40, 8, 128, 13824, 152064, 131072, 1e6, {"rms_norm_eps": 1e-6}
    ),
    "qwen2.5-32b": Shape(
        "qwen2", 64, 5120, 40, 8, 128, 27648, 152064, 131072, 1e6, {"rms_norm_eps": 1e-6}
    ),
    # Its config says 40960; longer prompts need YaRN, which changes no shape.
    "qwen3-8b": Shape(
        "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 131072, 1e6, {"rms_norm_eps": 1e-6}
    ),
    "qwen3-30b-a3b": Shape(
        *("qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, 262144, 1e7),
        extra={"rms_norm_eps": 1e-6, "norm_topk_prob": True, "decoder_sparse_step": 1},
        experts=128,
        chosen=8,
        expert_size=768,
    ),
    # A quarter of GLM-4.5-Air's 46 layers, whose 16-bit weights, read before they are made fp8, fit
    # one card.
    "glm-4.5-air-12-layers": Shape(
        *("glm4_moe", 12, 4096, 96, 8, 128, 10944, 151552, 131072, 1e6),
        extra=_GLM_AIR,
        experts=128,
        chosen=8,
        expert_size=1408,
        shared_size=1408,
        dense_layers=1,
    ),
    "gemma3-12b": Shape(
        *("gemma3_text", 48, 3840, 16, 8, 256, 15360, 262208, 131072, 1e6),
        extra={
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
        },
        full_every=6,
        window=1024,
    ),
    # With `extra` by the names of its config: its experts are as wide as `intermediate_size` says.
    "gpt-oss-20b": Shape(
        *("gpt_oss", 24, 2880, 64, 8, 64, 2880, 201088, 131072, 150000.0),
        extra={"num_local_experts": 32, "rms_norm_eps": 1e-5, "rope_parameters": _GPT_OSS_ROPE},
        experts=32,
        chosen=4,
        expert_size=2880,
        full_every=2,
        window=128,
    ),
    # A third of Qwen3-Next-80B-A3B's 48 layers, which fits one card in 16 bits.
    "qwen3-next-16-layers": Shape(
        *("qwen3_next", 16, 2048, 16, 2, 256, 5120, 151936, 262144, 1e7),
        extra=_QWEN3_NEXT,
        experts=512,
        chosen=10,
        expert_size=512,
        shared_size=512,
        full_every=4,
        recurrent=2 * 16 * 128 + 3 * 32 * 128 + 2 * 32,
        gated=True,
    ),
    "tiny-hybrid": Shape(
        *("gemma3_text", 8, 64, 4, 2, 32, 128, 512, 4096),
        extra={"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        full_every=4,
        window=128,
    ),
    "tiny": Shape("llama", 8, 64, 4, 2, 32, 128, 512, 4096),
}


def shape_of(model: Mapping[str, Any]) -> Shape:
    """The shape of a result's `model`."""
    names = [each.name for each in fields(Shape)]
    return Shape(**{name: model[name] for name in names if name in model})


def as_routed(shape: Shape, model: Mapping[str, Any]) -> Shape:
    """`shape` with the experts that a step of a result's `model` chooses among.

    gpt-oss' router has a bias, and GLM's adds one to its scores. vLLM's dummy weights are all of
    one size, norms included, so that products with them are far smaller than biases: every token
    chooses the same experts.
    """
    if model.get("dummy_weights") and shape.model_type in ("gpt_oss", "glm4_moe"):
        return replace(shape, experts=shape.chosen)
    return shape
