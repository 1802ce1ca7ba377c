"""Which KV stage each layer is in, and the KV cache spec that it gets for that."""

from typing import NamedTuple

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from vllm_kvx.cache.kv_cache_specs import (
    draft_specs,
    policy_kv_cache_specs,
    sliding_stage_specs,
)
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.models.hooked import HookedModel
from vllm_kvx.worker.pipeline import layers_of_rank


class LayerStages(NamedTuple):
    """The policy layers of this worker.

    first: the number of the first one among those of the model, of which there are `total`.
    stages: the KV stage of each.
    """

    first: int
    total: int
    stages: list[int]


def set_specs(model: HookedModel, config: VllmConfig, settings: KVSettings) -> LayerStages:
    """Gives the layers of `model` their KV cache specs; returns the stages of its policy layers.

    Raises:
        ValueError: other layers slide than the model's configuration says, rows would leave
            within the layers of a pipeline's rank, or a drafter's layers have no room.
    """
    attention, layout = model.attention_layers(), settings.layout
    policy_layers = {layer.layer_name for layer in attention}
    first, total = layers_of_rank(len(attention), config)
    numbered = list(enumerate(model.every_layer(), first))
    numbers = [number for number, layer in numbered if layer.layer_name in policy_layers]
    above = {number: layer for number, layer in numbered if layer.layer_name not in policy_layers}
    if layout.propagates and tuple(above) != layout.sliding:
        raise ValueError(
            f"layers {', '.join(map(str, above)) or 'none'} of this model slide over a window, and "
            f"its configuration says {', '.join(map(str, layout.sliding)) or 'none'}: policies "
            "that propagate cannot run on it"
        )
    windows = layout.windows
    longest = max((layer.sliding_window or 0 for layer in above.values()), default=0)
    if windows is not None and longest > windows.reach + 1:
        raise ValueError(
            f"a layer of this model sees {longest} tokens, and its configuration says "
            f"{windows.reach}: policies that propagate cannot run on it"
        )
    is_shared = total > len(attention)
    end = first + len(attention)
    if is_shared and any(first < cut < end for cut in layout.row_cuts):
        raise ValueError(
            f"this rank of the pipeline has layers {first} to {end - 1}, and rows would leave "
            f"before one of {', '.join(map(str, layout.row_cuts))}"
        )
    divides = len(layout.stage_starts) > 1 and (is_shared or not layout.propagates)
    if divides and total != settings.num_layers:
        raise ValueError(
            f"{total} layers of this model have full attention, and its configuration "
            f"says {settings.num_layers}: policies that divide layers, such as pyramidkv, cannot "
            "run on it"
        )
    others = [
        layer
        for layer in get_layers_from_vllm_config(config, Attention).values()
        if layer.layer_name not in policy_layers
    ]
    num_layers = config.model_config.get_total_num_hidden_layers()
    # Of a pipeline every rank forms the stages of the whole model.
    everywhere = range(total) if is_shared else numbers
    # A drafter is loaded after the model that it drafts for.
    drafts = [layer for layer in others if layer.is_draft_layer]
    slides = [layer for layer in others if not layer.is_draft_layer]
    shared = numbers, everywhere, bool(drafts)
    policy_kv_cache_specs(attention, settings, num_layers - total, slides, *shared)
    if drafts and (spec := attention[0].get_kv_cache_spec(config)) is not None:
        draft_specs(drafts, spec.page_size_bytes)
    sliding_stage_specs(above, layout)
    return LayerStages(first, total, [layout.stage_of(number) for number in numbers])
