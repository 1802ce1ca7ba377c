"""A plain Llama decoder for training, with SPEED visibility by gathering rows.

Prompt rows above layer K are not computed at all, so no mask has to be right: see `forward`.
B sequences, T tokens, n segments of S rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes, under the names of a transformers LlamaConfig."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 8192
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


# Parameter -> name of the module inside a transformers Llama layer.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class Llama(nn.Module):
    """Weights stacked over layers (first dimension), so that an optimizer step is a few kernels."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = s = shape
        layers, hidden, inner = s.num_hidden_layers, s.hidden_size, s.intermediate_size
        queries, keys = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim

        def matrix(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(layers, *size) * size[-1] ** -0.5)

        self.embed = nn.Parameter(torch.randn(s.vocab_size, hidden) * 0.02)
        self.norm = nn.Parameter(torch.ones(hidden))
        self.attn_norm = nn.Parameter(torch.ones(layers, hidden))
        self.mlp_norm = nn.Parameter(torch.ones(layers, hidden))
        self.q, self.k, self.v = matrix(queries, hidden), matrix(keys, hidden), matrix(keys, hidden)
        self.o = matrix(hidden, queries)
        self.gate, self.up, self.down = (
            matrix(inner, hidden),
            matrix(inner, hidden),
            matrix(hidden, inner),
        )
        with torch.no_grad():
            self.o.mul_((2 * layers) ** -0.5)
            self.down.mul_((2 * layers) ** -0.5)
        inverse = s.rope_theta ** -(torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angles = torch.arange(s.max_position_embeddings).float()[:, None] * inverse
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(
        self, tokens: Tensor, rows: Tensor, shallow: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Logits [B, n, S, V] of the rows `rows` [B, n, S] of `tokens` [B, T].

        A segment is one question: its first row is the last prompt token (the tail), the others
        are the answer's. Layers 0..shallow-1 run all T rows, causally. Above, each segment is a
        sequence of its own, [BOS, tail, answer...] with its original positions, causal: a row sees
        BOS and the segment's rows at or before it. That is Eq. 5, because the rows left out have
        no keys there, and because BOS sees only itself, so that every segment has the same BOS.
        `shallow` = number of layers is full depth for every row.
        """
        s = self.shape
        batch, length = tokens.shape
        count, size = rows.shape[1:]
        cast = {name: getattr(self, name).to(dtype).unbind(0) for name in LAYER_NAMES}
        embed = self.embed.to(dtype)
        cos, sin = self.cos.to(dtype), self.sin.to(dtype)
        x = F.embedding(tokens, embed)
        where = (cos[None, None, :length], sin[None, None, :length])
        for layer in range(shallow):
            x = self._block(x, {name: w[layer] for name, w in cast.items()}, where)
        if shallow < s.num_hidden_layers:
            rows = torch.cat([rows.new_zeros(batch, count, 1), rows], dim=2)
        flat = rows.flatten(1)  # [B, n * (1 + S)]
        x = x.gather(1, flat[..., None].expand(-1, -1, s.hidden_size))
        x = x.view(batch * count, -1, s.hidden_size)
        if shallow < s.num_hidden_layers:
            position = rows.view(batch * count, 1, -1)
            where = (cos[position], sin[position])
            for layer in range(shallow, s.num_hidden_layers):
                x = self._block(x, {name: w[layer] for name, w in cast.items()}, where)
            x = x[:, 1:]
        x = F.rms_norm(x, (s.hidden_size,), self.norm.to(dtype), s.rms_norm_eps)
        return (x @ embed.T).view(batch, count, size, s.vocab_size)

    def _block(self, x: Tensor, w: dict[str, Tensor], where: tuple[Tensor, Tensor]) -> Tensor:
        """One decoder layer on x [B, T, D], causal; `where` is cos and sin [B or 1, 1, T, head]."""
        s = self.shape
        h = F.rms_norm(x, (s.hidden_size,), w["attn_norm"], s.rms_norm_eps)
        q, k, v = (
            (h @ w[name].T).unflatten(-1, (-1, s.head_dim)).transpose(1, 2) for name in "qkv"
        )
        q, k = _rotate(q, *where), _rotate(k, *where)
        groups = s.num_attention_heads // s.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2) @ w["o"].T
        h = F.rms_norm(x, (s.hidden_size,), w["mlp_norm"], s.rms_norm_eps)
        return x + (F.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x [B, heads, T, head_dim], halves as transformers has them."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def save(model: Llama, directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16, tied)."""
    s = model.shape
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_hidden_layers": s.num_hidden_layers,
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.num_key_value_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": s.max_position_embeddings,
        "rms_norm_eps": s.rms_norm_eps,
        "rope_theta": s.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **ids,
    }
    tensors = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for name, module in LAYER_NAMES.items():
        for layer, weight in enumerate(getattr(model, name)):
            tensors[f"model.layers.{layer}.{module}.weight"] = weight
    directory.mkdir(parents=True, exist_ok=True)
    stored = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous().clone()
        for name, weight in tensors.items()
    }
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {**ids, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load(directory: Path) -> Llama:
    """The model that `save` wrote, its bfloat16 weights held in float32."""
    config = json.loads((directory / "config.json").read_text())
    model = Llama(Shape(**{name: config[name] for name in Shape.__dataclass_fields__}))
    stored = load_file(directory / "model.safetensors")
    with torch.no_grad():
        model.embed.copy_(stored["model.embed_tokens.weight"])
        model.norm.copy_(stored["model.norm.weight"])
        for name, module in LAYER_NAMES.items():
            for layer, weight in enumerate(getattr(model, name)):
                weight.copy_(stored[f"model.layers.{layer}.{module}.weight"])
    return model
