"""The dimensions of models that are measured with random weights, or of a checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from vllm_kvx.tools.experts import Experts

# By model_type, what the name of the model's class begins with.
_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gemma3_text": "Gemma3",
}


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model, by the names of its config.json.

    experts, chosen, expert_size: of a layer whose MLP is experts, how many it has, how many of them
        a token runs, and the intermediate size of each; 0 where the MLP is dense.
    full_every, window: one layer in so many has full attention, the last of them, and the others
        see so many tokens; 0 where all have full attention.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    rope_theta: float = 500000.0
    extra: dict[str, Any] = field(default_factory=dict)
    experts: int = 0
    chosen: int = 0
    expert_size: int = 0
    shared_size: int = 0
    dense_layers: int = 0
    full_every: int = 0
    window: int = 0

    @property
    def full_layers(self) -> int:
        """Layers with full attention, which policies are about."""
        return self.layers // self.full_every if self.full_every else self.layers

    def weights_of(self, layer: int) -> int:
        """Elements of the matrices of `layer` that a token uses."""
        return self._dense_weights if layer < self.dense_layers else self.layer_weights

    def all_read(self, tokens: float) -> float:
        """Elements of all matrices that a step of so many tokens reads, the head's too."""
        with_experts = self.layers - self.dense_layers
        layers = self.dense_layers * self._dense_weights + with_experts * self.weights_read(tokens)
        return layers + self.head_weights

    @property
    def _dense_weights(self) -> int:
        return self.hidden * (self._attention + 3 * self.intermediate)

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer, of those with experts, that a token uses.

        They are the projections of q, k, v and o; gate, up and down of its experts or of the MLP;
        and the router.
        """
        mlp = 3 * self.intermediate
        if self.experts:
            mlp = 3 * (self.chosen * self.expert_size + self.shared_size) + self.experts
        return self.hidden * (self._attention + mlp)

    @property
    def _attention(self) -> int:
        return (2 * self.heads + 2 * self.kv_heads) * self.head_dim

    def weights_read(self, tokens: float) -> float:
        """Elements of one layer's matrices that a step of so many tokens reads.

        Of E experts k a token, E (1 - (1 - k/E)^tokens), if tokens choose at random.
        """
        if not self.experts:
            return self.layer_weights
        used = self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)
        mlp = 3 * (used * self.expert_size + self.shared_size) + self.experts
        return self.hidden * (self._attention + mlp)

    @property
    def head_weights(self) -> int:
        """Elements of the output projection; the embedding is looked up, not multiplied."""
        return self.hidden * self.vocab

    def config(self) -> dict[str, Any]:
        """The config.json of a model of this shape."""
        experts = {
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.expert_size,
        }
        return {
            "architectures": [f"{_CLASSES[self.model_type]}ForCausalLM"],
            "model_type": self.model_type,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_position,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **(experts if self.experts else {}),
            **(self._windows if self.full_every else {}),
            **self.extra,
        }

    @property
    def _windows(self) -> dict[str, Any]:
        kinds = ["sliding_attention"] * (self.full_every - 1) + ["full_attention"]
        return {
            "layer_types": kinds * self.full_layers,
            "sliding_window": self.window,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": self.rope_theta},
            },
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Shape":
        """The shape of a checkpoint, from its config.json."""
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        experts = Experts.of(config) or Experts(0, 0, 0)
        kinds = config.get("layer_types") or []
        slides = "sliding_attention" in kinds and "full_attention" in kinds
        return cls(
            model_type=config["model_type"],
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            max_position=config["max_position_embeddings"],
            experts=experts.count,
            chosen=experts.chosen,
            expert_size=experts.size,
            shared_size=experts.shared,
            dense_layers=experts.dense_layers,
            full_every=kinds.index("full_attention") + 1 if slides else 0,
            window=config["sliding_window"] if slides else 0,
        )

    def as_dict(self) -> dict[str, Any]:
        """By field; what earlier versions did not have only where there is any."""
        optional = {"experts", "chosen", "expert_size", "shared_size", "dense_layers"}
        optional |= {"full_every", "window"}
        return {name: each for name, each in asdict(self).items() if each or name not in optional}


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
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
