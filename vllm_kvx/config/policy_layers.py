"""Which of a model's layers policies are about, as far as its configuration tells.

Those with full attention over the paged cache: *policy layers*. Layers that slide over a window,
and layers that keep a state, hold the same amount whatever the context, and stay vLLM's business.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_kvx.policy.windows import Windows

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# What configurations call a layer with full attention; in a "hybrid" one a state is beside it.
_FULL = ("full_attention", "attention", "global_attention", "hybrid")


def num_policy_layers(model_config: "ModelConfig") -> int:
    """The layers whose entries follow policies; 0 if all slide over a window."""
    total = model_config.get_total_num_hidden_layers()
    slides = model_config.get_sliding_window() is not None
    if not slides and not model_config.is_hybrid:
        return total
    kinds = layer_kinds(model_config.hf_text_config)
    if len(kinds) != total:
        # Without a list a window is every layer's, and a layer may keep a state beside its keys.
        return 0 if slides and not model_config.is_hybrid else total
    return sum(map(is_full, kinds))


def num_kv_heads(model_config: "ModelConfig") -> int:
    """KV heads of a layer with full attention, of all ranks; the fewest where such layers differ.

    Gemma 4's have fewer than its layers that slide, which vLLM counts.
    """
    total = model_config.get_total_num_kv_heads()
    layers = own_configs(model_config.hf_text_config)
    if layers is None:
        return total
    kinds = layer_kinds(model_config.hf_text_config)
    of_full = (
        layer.num_key_value_heads
        for layer, kind in zip(layers, kinds, strict=False)
        if is_full(kind)
    )
    return min(of_full, default=total)


def sliding_layers(model_config: "ModelConfig") -> tuple[int, ...]:
    """The layers that slide over a window, where all others have full attention; else none."""
    if model_config.get_sliding_window() is None or model_config.is_hybrid:
        return ()
    kinds = layer_kinds(model_config.hf_text_config)
    if len(kinds) != model_config.get_total_num_hidden_layers():
        return ()
    return tuple(layer for layer, kind in enumerate(kinds) if not is_full(kind))


def windows_of(model_config: "ModelConfig") -> Windows | None:
    """The same layers, and how far they see; None if there are none."""
    return _windows(sliding_layers(model_config), model_config.get_sliding_window())


def windows_by_config(text_config: Any) -> Windows | None:
    """The same by a configuration alone: None also where a layer keeps a state."""
    kinds = layer_kinds(text_config)
    if not all(is_full(kind) or "sliding" in kind for kind in kinds):
        return None
    layers = tuple(layer for layer, kind in enumerate(kinds) if not is_full(kind))
    return _windows(layers, getattr(text_config, "sliding_window", None))


def slides_by_config(text_config: Any) -> bool:
    """Whether a configuration has layers that slide over a window, one of them or all."""
    if getattr(text_config, "sliding_window", None) is None:
        return False
    kinds = layer_kinds(text_config)
    return not kinds or any("sliding" in kind for kind in kinds)


def _windows(layers: tuple[int, ...], length: int | None) -> Windows | None:
    # Some models' layers see one token more than their configuration says.
    return Windows(layers, length) if layers and length else None


def is_mixed(model_config: "ModelConfig") -> bool:
    """Whether some layers are policy layers and some are not, or keep a state beside."""
    count = num_policy_layers(model_config)
    return model_config.is_hybrid or 0 < count < model_config.get_total_num_hidden_layers()


def own_configs(text_config: Any) -> Sequence[Any] | None:
    """A configuration of each layer, where transformers has layers of different sizes; else None.

    It refuses to say one size for all then, as of Gemma 4.
    """
    if not getattr(text_config, "is_heterogeneous", False):
        return None
    found: Sequence[Any] = text_config.per_layer_config
    return found


def shares_keys(text_config: Any) -> bool:
    """Whether a configuration says that layers with full attention read an earlier one's keys.

    They are among the last ones, as Gemma 3n's and some of Gemma 4's.
    """
    count = getattr(text_config, "num_kv_shared_layers", None) or 0
    kinds = layer_kinds(text_config) or ["full_attention"]
    return bool(count) and any(map(is_full, kinds[-count:]))


def is_full(kind: str) -> bool:
    """Whether a configuration that says `kind` of a layer means one with full attention."""
    return kind in _FULL


def layer_kinds(text_config: Any) -> list[str]:
    """What a configuration says of each layer; empty if it says nothing."""
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(text_config, name, None)
        if kinds:
            return list(kinds)
    # MiMo-V2's name: 1 slides.
    pattern = getattr(text_config, "hybrid_layer_pattern", None)
    if isinstance(pattern, list) and set(pattern) <= {0, 1}:
        return ["sliding_attention" if slides else "full_attention" for slides in pattern]
    return []
