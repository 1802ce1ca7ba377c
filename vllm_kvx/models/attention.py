"""The attention layers of whatever model vLLM has loaded, and what policies cannot do with some."""

from collections.abc import Container, Sequence
from typing import Any

from torch import nn
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

# Attributes that one layer's attention must share with all others: scratch of scores and moves is
# one layer's, whichever runs.
_SHAPE = ("num_heads", "num_kv_heads", "head_size", "head_size_v")


# Layers whose memory does not grow with the context: vLLM's own specs, managers and lengths serve
# them under any policy.
_VLLMS_OWN = (SlidingWindowSpec, MambaSpec)


def attention_layers(config: VllmConfig) -> list[Attention]:
    """The attention of the model's *policy layers*, in order: those with full attention.

    The KV cache spec that a layer asks for decides. All other layers slide over a window or keep a
    state, and stay vLLM's business.

    Raises:
        ValueError: a layer has two full attentions, or a kind that is neither of these; or no layer
            has full attention. It says what the model has.
    """
    found: dict[int, Attention] = {}
    layers_by_name = get_layers_from_vllm_config(config, AttentionLayerBase)  # type: ignore[type-abstract]
    for name, layer in layers_by_name.items():
        is_known = isinstance(layer, AttentionLayerBase)
        if is_known and isinstance(layer.get_kv_cache_spec(config), _VLLMS_OWN):
            continue
        found[_number(name, found)] = _plain(name, layer)
    if not found:
        raise _cannot("none of its layers has full attention")
    layers = [found[number] for number in sorted(found)]
    # Where the user has layers skip a quantized cache, that was checked at start.
    skips = config.cache_config.kv_cache_dtype_skip_layers
    alike = _SHAPE if skips else (*_SHAPE, "kv_cache_dtype")
    for name in alike:
        if len(values := {getattr(layer, name) for layer in layers}) > 1:
            raise _cannot(f"its layers have unequal {name}: {', '.join(map(str, values))}")
    if layers[0].head_size != layers[0].head_size_v:
        raise _cannot(
            f"its keys have {layers[0].head_size} dimensions and its values {layers[0].head_size_v}"
        )
    return layers


def every_layer(
    config: VllmConfig, layers: Sequence[Attention], num_layers: int
) -> list[Attention]:
    """The attention of each of the model's layers, in order, as policies that propagate need it.

    layers: those with full attention, see `attention_layers`.

    Raises:
        ValueError: a layer has neither full attention nor slides over a window, has both, or
            slides in a way of its own.
    """
    full, found = set(map(id, layers)), dict[int, Attention]()
    for name, layer in get_layers_from_vllm_config(config, Attention).items():
        if id(layer) not in full:
            if not isinstance(layer.get_kv_cache_spec(config), SlidingWindowSpec):
                continue
            _plain(name, layer)
        found[_number(name, found)] = layer
    if sorted(found) != list(range(num_layers)):
        raise _cannot(
            f"{len(found)} of its {num_layers} layers have full attention or slide over a window, "
            "and policies that propagate need one of these in every layer",
            "Those that only retain or retrieve (snapkv, fier and others) remain",
        )
    return [found[number] for number in range(num_layers)]


def _plain(name: str, layer: object) -> Attention:
    """The layer, unless it is not vLLM's attention itself over a sequence's own earlier keys."""
    # A subclass attends in a way of its own: within chunks, or with sinks.
    if type(layer) is not Attention:
        raise _cannot(f"some of its layers, such as {name}, are not plain attention")
    if layer.attn_type != AttentionType.DECODER:
        raise _cannot(f"its attention is of type {layer.attn_type}")
    if layer.kv_sharing_target_layer_name is not None:
        raise _cannot("some of its layers read other layers' keys and values")
    return layer


def _number(name: str, found: Container[int]) -> int:
    """The number of the layer with attention `name`, which is none of those that were found."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1 or numbers[0] in found:
        raise _cannot(f"it has more than one attention a layer ({name})")
    return numbers[0]


def check_softmax(layers: Sequence[Attention], computes: bool, moves: bool) -> None:
    """Refuses what attention does to its logits and the server's policies do not know.

    Soft caps and sinks are known: every softmax that is computed beside vLLM's has them.

    Args:
        computes: whether a policy computes attention beside vLLM's: it scores, or retrieves.
        moves: whether entries may be stored elsewhere than their positions say.

    Raises:
        ValueError: attention has ALiBi, and that matters, or sinks that cannot be read.
    """
    for layer in layers:
        impl: Any = layer.impl
        if getattr(impl, "alibi_slopes", None) is not None:
            if computes:
                raise _cannot("its attention has ALiBi, which neither scores nor retrieval compute")
            if moves:
                raise _cannot("its attention has ALiBi, which counts stored entries, not positions")
        if computes and layer.has_sink and getattr(impl, "sinks", None) is None:
            raise _cannot(
                f"its attention has sinks, and attention backend {layer.attn_backend.get_name()} "
                "keeps them where they are not found",
                "Set --attention-backend TRITON_ATTN",
            )


def output_projections(model: nn.Module, layers: Sequence[Attention]) -> list[nn.Module]:
    """What projects the output of each layer's attention, in order.

    It is the row-parallel linear layer in the module that has the attention.

    Raises:
        ValueError: a module has none, or several.
    """
    parents = {
        id(child): module
        for module in model.modules()
        for child in module.children()
        if isinstance(child, Attention)
    }
    found: list[nn.Module] = []
    for layer in layers:
        beside = parents[id(layer)].children() if id(layer) in parents else ()
        linear = [each for each in beside if isinstance(each, RowParallelLinear)]
        size = layer.num_heads * layer.head_size_v
        if len(linear) != 1 or linear[0].input_size_per_partition != size:
            raise _cannot(
                "the projection of its attention's output is not known, by whose weights "
                "score=critical (criticalkv's) rates values",
                "All others remain",
            )
        found += linear
    return found


def _cannot(reason: str, way_out: str = "full alone remains") -> ValueError:
    return ValueError(f"this model cannot run under the server's KV policies: {reason}. {way_out}")
