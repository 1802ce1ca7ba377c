"""The dimensions of a model, by which its work is counted."""

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_kvx.tools.experts import Experts

# By model_type, what the name of the model's class begins with.
_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "glm4_moe": "Glm4Moe",
    "gemma3_text": "Gemma3",
    "gpt_oss": "GptOss",
    "qwen3_next": "Qwen3Next",
}


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model, by the names of its config.json.

    experts, chosen, expert_size: of a layer whose MLP is experts, how many it has, how many of them
        a token runs, and the intermediate size of each; 0 where the MLP is dense.
    full_every, window: one layer in so many has full attention, the last of them, and the others
        see so many tokens; 0 where all have full attention.
    recurrent: what projections of a layer that keeps a state have in rows of `hidden` elements; the
        others are such layers then, and not windows.
    gated: attention's output goes through a gate, which is as large as the queries.
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
    recurrent: int = 0
    gated: bool = False

    @property
    def full_layers(self) -> int:
        """Layers with full attention, which policies are about."""
        return self.layers // self.full_every if self.full_every else self.layers

    def weights_of(self, layer: int) -> int:
        """Elements of the matrices of `layer` that a token uses.

        Layers with full attention are counted first, and those that keep a state behind them.
        """
        if layer < self.dense_layers:
            return self._dense_weights
        is_recurrent = self.recurrent and layer >= self.full_layers
        return self.layer_weights + (self._recurrent_more if is_recurrent else 0)

    def all_read(self, tokens: float) -> float:
        """Elements of all matrices that a step of so many tokens reads, the head's too."""
        with_experts = self.layers - self.dense_layers
        layers = self.dense_layers * self._dense_weights + with_experts * self.weights_read(tokens)
        more = self._recurrent_more * (self.layers - self.full_layers) if self.recurrent else 0
        return layers + more + self.head_weights

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
        return ((3 if self.gated else 2) * self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def _recurrent_more(self) -> int:
        """What a layer that keeps a state has beyond one with attention."""
        return self.hidden * (self.recurrent - self._attention)

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
            **({"shared_expert_intermediate_size": self.shared_size} if self.shared_size else {}),
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
            **(self._windows if self.window else {}),
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
        interval = config.get("full_attention_interval", 0)
        keys, values = (
            config.get(f"linear_num_{each}_heads", 0) * config.get(f"linear_{each}_head_dim", 0)
            for each in ("key", "value")
        )
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
            full_every=kinds.index("full_attention") + 1 if slides else interval,
            window=config["sliding_window"] if slides else 0,
            # q, k, v, the gate and the output, and two numbers a head.
            recurrent=2 * keys + 3 * values + 2 * config.get("linear_num_value_heads", 0),
            gated=bool(interval),
        )

    def as_dict(self) -> dict[str, Any]:
        """By field; what earlier versions did not have only where there is any."""
        optional = {"experts", "chosen", "expert_size", "shared_size", "dense_layers"}
        optional |= {"full_every", "window", "recurrent", "gated"}
        return {name: each for name, each in asdict(self).items() if each or name not in optional}
