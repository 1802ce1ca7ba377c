"""The experts of a model, from its config.json, by whichever names its architecture uses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_COUNT = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk")
_SIZE = ("moe_intermediate_size", "expert_hidden_dim", "intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_DENSE = ("first_k_dense_replace", "moe_layer_start_index")


@dataclass(frozen=True)
class Experts:
    """The MLPs of a model that has experts.

    count: of a layer. chosen: that a token runs. size: the intermediate size of each.
    shared: the intermediate size of those together that every token runs, 0 where there are none.
    dense_layers: the first layers, whose MLP is dense.
    """

    count: int
    chosen: int
    size: int
    shared: int = 0
    dense_layers: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Experts | None":
        """Those of a text model's configuration; None where it has none.

        Where experts alternate with dense layers in another way than from one layer on, all
        further layers are taken to have them.
        """
        count = _first(config, _COUNT)
        if count < 2:
            return None
        size = _first(config, _SIZE)
        # Qwen2-MoE gives the size of its one.
        shared = int(config.get("shared_expert_intermediate_size") or 0)
        return cls(
            count,
            max(_first(config, _CHOSEN), 1),
            size,
            shared or _first(config, _SHARED) * size,
            _first(config, _DENSE),
        )


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of these fields that is a number, or of a list of numbers its first; else 0."""
    for name in names:
        value = config.get(name)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and value:
            return value
    return 0
