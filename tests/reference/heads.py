"""Tiny random heads that draft by a model's hidden states, and a dense reference of their drafts.

EAGLE, EAGLE-3 and the MTP layer of MiMo, each of one layer. Their weights are drawn as those of
``models``, so that attention is peaked: what a head reads of its cache decides what it drafts.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from reference.models import gain

Kind = Literal["eagle", "eagle3", "mtp"]
KINDS: tuple[Kind, ...] = ("eagle", "eagle3", "mtp")
# An EAGLE-3 head takes the states before these layers of the model.
AUXILIARY = (1, 2, 3)
_ARCHITECTURES = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}
_LAYERS = {"eagle": "layers.0", "eagle3": "midlayer", "mtp": "model.mtp_layers.0"}


def build_head(path: Path, model: Path, kind: Kind, *, seed: int = 1) -> Path:
    """Writes a head for a model of ``build_model`` to `path` and returns it.

    model: a Llama; for `mtp` a Qwen2, which is written to `path` too, as a MiMo.
    """
    config = json.loads((model / "config.json").read_text())
    hidden, layer = config["hidden_size"], _LAYERS[kind]
    shapes = _layer_shapes(config, layer, hidden * (2 if kind == "eagle3" else 1))
    weights: dict[str, Tensor] = {}
    if kind == "mtp":
        # Transformers does not know MiMo, whose configuration is a Qwen2's.
        config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        weights = load_file(model / "model.safetensors")
        shapes[f"{layer}.input_proj.weight"] = hidden, 2 * hidden
        for name in ("token", "hidden", "final"):
            shapes[f"{layer}.{name}_layernorm.weight"] = (hidden,)
        for name in "qkv":
            rows, _ = shapes[f"{layer}.self_attn.{name}_proj.weight"]
            shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
    else:
        config |= {"num_hidden_layers": 1, "architectures": [_ARCHITECTURES[kind]]}
        shapes["fc.weight"] = hidden, (len(AUXILIARY) if kind == "eagle3" else 2) * hidden
    if kind == "eagle":  # Its layer takes what `fc` makes as it is.
        del shapes[f"{layer}.input_layernorm.weight"]
    if kind == "eagle3":
        config["draft_vocab_size"] = config["vocab_size"]
        config["eagle_aux_hidden_state_layer_ids"] = AUXILIARY
        shapes["lm_head.weight"] = config["vocab_size"], hidden
        shapes |= {"norm.weight": (hidden,), f"{layer}.hidden_norm.weight": (hidden,)}
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights | _drawn(shapes, seed), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def _layer_shapes(config: Mapping[str, Any], layer: str, width: int) -> dict[str, tuple[int, ...]]:
    """The weights of a decoder layer whose attention takes `width` channels, by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, size = _heads(config)
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


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, KV heads and their size."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return heads, config["num_key_value_heads"], size


def _drawn(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            weights[name] = 1 + 0.2 * noise.clamp(-2, 2)
        elif name.endswith("bias"):
            weights[name] = 0.3 * noise
        else:
            weights[name] = noise * gain(name) / math.sqrt(shape[1])
    return weights


@dataclass(frozen=True)
class Head:
    """A head over the whole text, without a cache.

    weights: its own and its model's, by their names in the checkpoints.
    """

    kind: Kind
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    @classmethod
    def load(cls, path: Path, model: Path, kind: Kind) -> "Head":
        """The head that ``build_head`` wrote to `path` for `model`."""
        weights = load_file(model / "model.safetensors") | load_file(path / "model.safetensors")
        return cls(kind, json.loads((path / "config.json").read_text()), weights)

    @torch.no_grad()
    def drafts(self, tokens: list[int], states: Tensor, count: int) -> Tensor:
        """(count, V) logits of `count` greedy drafts behind `tokens`.

        tokens: N + 1 of them, the last of which is sampled and not computed yet.
        states: (N, H) hidden states of the others; of an EAGLE-3 head (N, 3 H), of its layers.
        """
        tokens = list(tokens)
        if self.kind == "eagle3":
            states = states @ self.weights["fc.weight"].T
        found = []
        for _ in range(count):
            embeds = self.weights["model.embed_tokens.weight"][torch.tensor(tokens[1:])]
            out, fed_back = self._run(embeds, states)
            head = self.weights["lm_head.weight"]
            found.append(out @ head.T)
            tokens.append(int(found[-1].argmax()))
            states = torch.cat([states, fed_back[None]])
        return torch.stack(found)

    def _run(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """(N, H) embeddings and states -> (H,) the last row's output, and what stands for the
        model's state of the next token."""
        layer = _LAYERS[self.kind]
        if self.kind == "eagle":
            stream = torch.cat([embeds, states], -1) @ self.weights["fc.weight"].T
            inputs = stream
        elif self.kind == "eagle3":
            stream = states
            normed = self._norm(states, f"{layer}.hidden_norm")
            inputs = torch.cat([self._norm(embeds, f"{layer}.input_layernorm"), normed], -1)
        else:
            embeds = torch.cat([torch.zeros_like(embeds[:1]), embeds[1:]])
            normed = self._norm(states, f"{layer}.hidden_layernorm")
            both = torch.cat([normed, self._norm(embeds, f"{layer}.token_layernorm")], -1)
            stream = both @ self.weights[f"{layer}.input_proj.weight"].T
            inputs = self._norm(stream, f"{layer}.input_layernorm")
        stream = stream + self._attend(inputs, f"{layer}.self_attn")
        inner = self._norm(stream, f"{layer}.post_attention_layernorm")
        names = ("gate", "up", "down")
        gate, up, down = (self.weights[f"{layer}.mlp.{name}_proj.weight"] for name in names)
        last = (stream + (silu(inner @ gate.T) * (inner @ up.T)) @ down.T)[-1]
        if self.kind == "eagle":
            return last, last
        if self.kind == "eagle3":
            return self._norm(last, "norm"), last
        out = self._norm(last, f"{layer}.final_layernorm")
        return out, out

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return rows * scale * self.weights[f"{name}.weight"]

    def _attend(self, rows: Tensor, name: str) -> Tensor:
        heads, kv_heads, size = _heads(self.config)
        query, key, value = (self._project(rows, f"{name}.{n}_proj", size) for n in "qkv")
        query, key = _rotated(query), _rotated(key)
        key, value = (x.repeat_interleave(heads // kv_heads, 0) for x in (key, value))
        out = scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(0, 1).flatten(1) @ self.weights[f"{name}.o_proj.weight"].T

    def _project(self, rows: Tensor, name: str, size: int) -> Tensor:
        """(N, C) -> (heads, N, size)."""
        out = rows @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0)
        return out.unflatten(-1, (-1, size)).transpose(0, 1)


def _rotated(rows: Tensor, base: float = 10000.0) -> Tensor:
    """(heads, N, size) by the angles of their positions, as a Llama's are."""
    half = rows.shape[-1] // 2
    angles = torch.arange(rows.shape[1])[:, None] * base ** (-torch.arange(half) / half)
    first, second = rows.split(half, -1)
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        -1,
    )
