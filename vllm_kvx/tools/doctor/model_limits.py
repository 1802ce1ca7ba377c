"""Which policies a model can run under, as far as its configuration tells.

What a policy needs of a model decides, never the model's name. Retention and retrieval need vLLM's
own attention in every layer. Propagation also needs ranges of layers, which every decoder that
supports pipeline parallelism can run. What attention does to its logits is known for certain once
the model is loaded: see ``attention.check_softmax``.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm_kvx.config.policy_layers import is_full, layer_kinds, shares_keys
from vllm_kvx.tools.kv_layers import NOTHING

FULL_ALONE = "full alone"
NO_POLICY = "no KV policy"
NO_PROPAGATION = "policies that retain or retrieve, such as snapkv or fier"
BESIDE_WINDOWS = (
    f"speed-K, fastkv, structkv and gemfilter, each selecting at a layer with full attention, or "
    f"{NO_PROPAGATION}"
)


_UNKNOWN = {
    "alibi": "its attention has ALiBi",
    "attention_chunk_size": "its attention stays within chunks",
    "dual_chunk_attention_config": "its attention is in dual chunks",
}
# Fields of models whose decoder does not run as a stage of a pipeline does: Solar's and ChatGLM's.
_NO_RANGES = {
    "bskcn_tv": "some of its layers add the states of layers far below",
    "multi_query_group_num": "its layers are within another module of its decoder",
}
# Model types with compressed projections, whose attention vLLM runs as any other.
_PLAIN_LATENT = ("minicpm3",)


class Limit(NamedTuple):
    """What keeps some policies from a model, and those that remain."""

    reason: str
    remain: str


def limits_of(architecture: str, text_config: Mapping[str, Any]) -> Iterator[Limit]:
    """What a model of this architecture and configuration cannot do; nothing if all policies run.

    Args:
        architecture: as in config.json. text_config: of its language model.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    if text_config.get("kv_lora_rank") and text_config.get("model_type") not in _PLAIN_LATENT:
        yield Limit("its attention is multi-head latent (kv_lora_rank)", FULL_ALONE)
        return
    keys, values = text_config.get("head_dim"), text_config.get("v_head_dim")
    if keys and values and keys != values:
        yield Limit(f"its keys have {keys} dimensions and its values {values}", FULL_ALONE)
        return
    if shares_keys(SimpleNamespace(**text_config)):
        yield Limit("its last layers read earlier ones' keys (num_kv_shared_layers)", FULL_ALONE)
        return
    kinds = layer_kinds(SimpleNamespace(**text_config)) if _slides(text_config) else []
    full = sum(map(is_full, kinds))
    if _slides(text_config) and not full:
        yield Limit("every layer's attention slides over a window", FULL_ALONE)
        return
    for name, said in _UNKNOWN.items():
        if text_config.get(name):
            yield Limit(f"{said} ({name})", FULL_ALONE)
            return
    if architecture.startswith("Bloom"):
        yield Limit("its attention has ALiBi", FULL_ALONE)
        return
    registered = ModelRegistry.models.get(architecture)
    info = None if registered is None else registered.inspect_model_cls()
    if info is None or info.architecture.startswith("Transformers"):
        yield Limit(
            "vLLM has no code of its own for it, and runs it by Transformers' if it can, which "
            "cannot be asked for a range of its layers",
            NO_PROPAGATION,
        )
    else:
        if not info.is_text_generation_model:
            yield Limit("it generates nothing", NO_POLICY)
            return
        if info.is_attention_free:
            yield Limit("its layers keep a state in the place of keys", FULL_ALONE)
            return
        if info.supports_multimodal_raw_input_only:
            yield Limit("it takes no text alone", FULL_ALONE)
            return
        if info.is_hybrid:
            yield Limit(
                "some of its layers keep a state in the place of keys"
                f"{last_state(layer_kinds(SimpleNamespace(**text_config)))}",
                NO_PROPAGATION,
            )
            return
        if full < len(kinds):
            remain = BESIDE_WINDOWS if info.supports_pp else NO_PROPAGATION
            yield Limit(f"{len(kinds) - full} of its {len(kinds)} layers slide", remain)
        if not info.supports_pp:
            yield Limit("its code does not support pipeline parallelism", NO_PROPAGATION)
        for name, said in _NO_RANGES.items():
            if text_config.get(name):
                yield Limit(f"{said} ({name})", NO_PROPAGATION)


def last_state(kinds: list[str]) -> str:
    """Where tokens could leave such a model, in words, if its configuration lists its layers."""
    states = [
        i
        for i, kind in enumerate(kinds)
        if not (is_full(kind) or "sliding" in kind or kind in NOTHING)
    ]
    if not states or kinds[-1] == "hybrid":
        return ""
    above = len(kinds) - 1 - states[-1]
    where = f"in the {above} layer{'s' * (above != 1)} above it alone, which is not served"
    if not above:
        where = "nowhere"
    return f" (the last of them is layer {states[-1]}: tokens could leave {where})"


def reads_media(architecture: str) -> bool:
    """Whether vLLM's code of this architecture also reads images or sound."""
    from vllm.model_executor.models.registry import ModelRegistry

    registered = ModelRegistry.models.get(architecture)
    info = None if registered is None else registered.inspect_model_cls()
    return info is not None and info.supports_multimodal


def _slides(text_config: Mapping[str, Any]) -> bool:
    """Whether a layer's attention has a window, which a configuration may name and not use."""
    if not text_config.get("sliding_window"):
        return False
    types = text_config.get("layer_types")
    if types is not None:
        return "sliding_attention" in types
    return bool(text_config.get("use_sliding_window", True))
