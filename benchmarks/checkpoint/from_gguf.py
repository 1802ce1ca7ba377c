"""GGUF files as folders of transformers and vLLM: config, tokenizer, weights widened to bf16.

Three architectures are converted: Llama, Qwen2, and the text model of Gemma 3.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvx.errors import ToolError

if TYPE_CHECKING:
    import numpy as np

# What each GGUF tensor of a block is called in transformers.
_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# Gemma 3 has a norm before and one after each half of a layer, and norms of queries and keys.
_GEMMA_TENSORS = {
    **_TENSORS,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Every sixth layer of a Gemma 3 has full attention; a GGUF file does not say so.
_GEMMA_FULL_EVERY = 6
# Of the layers that slide, which a GGUF file does not have either.
_GEMMA_LOCAL_ROPE = 10_000.0

Fields = Mapping[str, Any]


def _plain_config(fields: Fields) -> dict[str, Any]:
    return {
        "num_key_value_heads": fields["attention.head_count_kv"],
        "rope_theta": fields["rope.freq_base"],
        "hidden_act": "silu",
    }


def _gemma_config(fields: Fields) -> dict[str, Any]:
    layers = range(1, fields["block_count"] + 1)
    return {
        "num_key_value_heads": fields["attention.head_count_kv"],
        "head_dim": fields["attention.key_length"],
        # Of every Gemma 3 but the 27B, whose heads have another size.
        "query_pre_attn_scalar": fields["attention.key_length"],
        "sliding_window": fields["attention.sliding_window"],
        "layer_types": [
            "sliding_attention" if layer % _GEMMA_FULL_EVERY else "full_attention"
            for layer in layers
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": fields["rope.freq_base"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": _GEMMA_LOCAL_ROPE},
        },
        "hidden_activation": "gelu_pytorch_tanh",
    }


@dataclass(frozen=True)
class Architecture:
    """How files of an architecture differ from transformers' model.

    model_class, model_type: transformers'. config: the part of its config that is the
    architecture's own, of the file's fields without their prefix. tensors: a block's, by the
    file's names. is_paired: queries and keys have the two halves of each rotary pair side by side.
    is_one_added: norms are stored as ``1 + weight``. tokenizer: options of its loading.
    """

    model_class: str
    model_type: str
    config: Callable[[Fields], dict[str, Any]] = _plain_config
    tensors: Mapping[str, str] = field(default_factory=lambda: _TENSORS)
    is_paired: bool = False
    is_one_added: bool = False
    tokenizer: Mapping[str, Any] = field(default_factory=dict)


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", is_paired=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _gemma_config,
        _GEMMA_TENSORS,
        is_one_added=True,
        # transformers does not read the file's `add_bos_token`, and Gemma is lost without a BOS.
        tokenizer={"add_bos_token": True},
    ),
}


def convert(gguf: Path, folder: Path, is_base: bool = False) -> None:
    """Config, tokenizer and bf16 safetensors of a GGUF file.

    The config is written last: a folder that has one is complete.

    gguf: the file. folder: where to write. is_base: whether the model was never taught to chat, so
    that its file has no chat template.

    Raises:
        ToolError: the file has another architecture, or no chat template where one is needed.
    """
    import transformers
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    name = reader.fields["general.architecture"].contents()
    if name not in ARCHITECTURES:
        raise ToolError(f"{gguf}: architecture {name}; converted are {', '.join(ARCHITECTURES)}")
    arch, prefix = ARCHITECTURES[name], f"{name}."
    fields = {
        key.removeprefix(prefix): value.contents()
        for key, value in reader.fields.items()
        if key.startswith(prefix)
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, **arch.tokenizer
    )
    if not tokenizer.chat_template and not is_base:
        raise ToolError(f"{gguf}: it carries no chat template, without which answers mean little")
    tokenizer.save_pretrained(folder)
    vocab_size = write_weights(reader, arch, fields, folder / "model.safetensors")
    config = {
        "architectures": [arch.model_class],
        "model_type": arch.model_type,
        "hidden_size": fields["embedding_length"],
        "intermediate_size": fields["feed_forward_length"],
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": fields["attention.head_count"],
        "max_position_embeddings": fields["context_length"],
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "vocab_size": vocab_size,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        # Without it transformers warns that the tokenizer may be a faulty one of Mistral's.
        "transformers_version": transformers.__version__,
        **arch.config(fields),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_weights(reader: Any, arch: Architecture, fields: Fields, target: Path) -> int:
    """Widens every tensor to bf16, writes them, and returns the size of the vocabulary."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from tqdm import tqdm

    names = {tensor.name for tensor in reader.tensors}
    state: dict[str, torch.Tensor] = {}
    for tensor in tqdm(reader.tensors, desc="bf16", unit=" tensors"):
        if tensor.name == "token_embd.weight" and "output.weight" in names:
            continue  # These models tie the two, and the output's copy is quantised less.
        quantised = GGMLQuantizationType(int(tensor.tensor_type))
        values = np.array(dequantize(tensor.data, quantised), dtype=np.float32)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        name = _name(tensor.name, arch)
        values = _as_trained(values, tensor.name, arch, fields)
        state[name] = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
    part_file = target.with_name(target.name + ".part")
    save_file(state, part_file, {"format": "pt"})
    part_file.chmod(0o644)
    os.replace(part_file, target)
    return state["model.embed_tokens.weight"].shape[0]


def _name(stored: str, arch: Architecture) -> str:
    """What transformers calls the tensor that a file calls `stored`."""
    stem, suffix = stored.rsplit(".", 1)
    if stem in ("output", "token_embd"):
        return f"model.embed_tokens.{suffix}"
    if stem == "output_norm":
        return f"model.norm.{suffix}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{arch.tensors[part]}.{suffix}"


def _as_trained(
    values: "np.ndarray", stored: str, arch: Architecture, fields: Fields
) -> "np.ndarray":
    """A tensor as transformers has it; `values` is float32, in the shape of the original."""
    part = stored.split(".")[-2]
    heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    if arch.is_paired and part in heads:
        pairs = values.reshape(fields[heads[part]], -1, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)
    if arch.is_one_added and part.endswith("norm"):
        return values - 1
    return values
