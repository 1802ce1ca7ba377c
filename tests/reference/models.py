"""Tiny random models on disk, the same bytes for the same arguments and seed.

The weights are not trained, so they are scaled by hand to make a test sensitive: attention rows are
peaked, every sublayer adds about as much to the residual stream as every other, and what the upper
layers read moves the logits. At the same time float32 rounding stays far below 1e-4 in a logprob.
An engine must be given `dtype="float32"`: vLLM's "auto" would run these checkpoints in bfloat16.
"""

import math
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

Arch = Literal["llama", "mistral", "qwen2", "qwen3"]
ARCHS: tuple[Arch, ...] = ("llama", "mistral", "qwen2", "qwen3")

UNK, BOS, EOS = 0, 1, 2

# Std of the q and k entries of a unit-RMS input; attention logits then have about its square.
QK_SCALE = 1.5
# Std of the logits, the final norm's output having unit RMS: larger is more confident.
LOGIT_SCALE = 1.5
# Gain of each layer's output projections.
OUT_SCALE = 0.7
BIAS_SCALE = 0.3


def build_model(
    path: str | Path,
    *,
    arch: Arch,
    layers: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int | None = None,
    intermediate: int = 128,
    vocab: int = 512,
    seed: int = 0,
    max_position_embeddings: int = 4096,
    **config_overrides: Any,
) -> Path:
    """Write a float32 model (config, generation config, safetensors) to `path` and return it.

    `hidden` is 64 unless given, except for Qwen2: vLLM derives its head size from the hidden size,
    so there it is `heads * head_dim`. `config_overrides` go to the config class as they are. For
    one seed llama and mistral hold the same weights: without a sliding window they are one model.
    """
    if heads % kv_heads:
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}")
    if hidden is None:
        hidden = heads * head_dim if arch == "qwen2" else 64
    if arch == "qwen2" and hidden != heads * head_dim:
        raise ValueError(f"qwen2 needs hidden == heads * head_dim, not {hidden}")
    fields: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "rms_norm_eps": 1e-5,
        "dtype": "float32",
    }
    if arch != "qwen2":
        fields["head_dim"] = head_dim
    if arch == "mistral":
        fields["sliding_window"] = None
    config = AutoConfig.for_model(arch, **(fields | config_overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw_weights(model, seed)
    # Without its own sampling defaults, so that a server and a test mean the same by "greedy".
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS)
    model.save_pretrained(path)
    return Path(path)


def add_tokenizer(path: str | Path, vocab: int) -> None:
    """Write a word-level tokenizer of `vocab` entries: word `w17` is token 17, split on spaces.

    Token 0 is `<unk>`, 1 `<s>`, 2 `</s>`; nothing is added to a prompt. The chat template joins
    the messages' contents, so `w5 w6` is the same prompt through either OpenAI route.
    """
    words = ["<unk>", "<s>", "</s>", *(f"w{token}" for token in range(3, vocab))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    tokenizer.save_pretrained(path)


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Fill every parameter from one generator, in the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            # Far enough from 1 that a forgotten or misplaced norm weight shows.
            scale = QK_SCALE if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
            weight.copy_(scale * (1 + 0.2 * noise.clamp(-2, 2)))
        elif name.endswith("bias"):
            weight.copy_(BIAS_SCALE * noise)
        elif "embed_tokens" in name:
            weight.copy_(noise)
        else:
            weight.copy_(noise * gain(name) / math.sqrt(weight.shape[1]))


def gain(name: str) -> float:
    """Output RMS of projection `name` for an input of RMS 1."""
    if "q_proj" in name or "k_proj" in name:
        return QK_SCALE
    if "lm_head" in name:
        return LOGIT_SCALE
    if "o_proj" in name or "down_proj" in name:
        return OUT_SCALE
    return 1.0
