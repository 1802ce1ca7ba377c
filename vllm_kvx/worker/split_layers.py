"""Layers that are split: the last one before rows leave, of which those need keys and values alone.

Above layer K - 1 of ``speed-K``, or the layer that selects, some rows go on. The others' attention
output and MLP of that layer reach nobody. So rows leave before the layer, their entries in it are
projected from the states below (``models/projection``), and the layer runs for the rest.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from vllm_kvx.config.disabled import SPLIT_LAYERS, disabled_parts
from vllm_kvx.ops.paged import ATTENTION_BACKENDS, ONE_PLAN
from vllm_kvx.policy.layout import Layout
from vllm_kvx.worker.rows import SegmentRows


class Cuts(NamedTuple):
    """Where the decoder's segments begin, and which of these layers are split.

    The first one begins with layer 0, or the first layer that a pipeline's rank has.
    """

    firsts: tuple[int, ...]
    split_layers: frozenset[int]

    def segment_of(self, layer: int) -> int:
        """The segment that a layer is in; the first one of those that other ranks have."""
        return max(sum(first <= layer for first in self.firsts) - 1, 0)

    def at_split_layers(self, rows: Sequence[SegmentRows | None]) -> dict[int, SegmentRows | None]:
        """The rows, which are by segment, of those that begin with a split layer; by that layer."""
        by_first = zip(self.firsts, rows, strict=True)
        return {first: ran for first, ran in by_first if first in self.split_layers}


def cuts_of(layout: Layout, attention: Sequence[Attention], config: VllmConfig) -> Cuts:
    """The segments of a server. attention: the model's attention layers.

    A row cut is at the first layer that rows do not run. The layer below is split, unless it is
    layer 0, below which there are no states, or slides over a window, which keeps too few entries,
    or the server disables splitting.
    """
    is_disabled = SPLIT_LAYERS in disabled_parts(config.additional_config)
    if is_disabled or not _can_split(layout, attention, config):
        return Cuts((0, *layout.row_cuts), frozenset())
    whole = {cut for cut in layout.row_cuts if cut == 1 or cut - 1 in layout.sliding}
    split_layers = frozenset(cut - 1 for cut in layout.row_cuts if cut not in whole)
    return Cuts((0, *sorted(split_layers | whole)), split_layers)


def _can_split(layout: Layout, attention: Sequence[Attention], config: VllmConfig) -> bool:
    """Whether layers can be split on this server."""
    if layout.projects:
        return False  # swiftkv needs every row of the layer below its cut.
    if config.compilation_config.pass_config.fuse_attn_quant:
        return False  # A split layer writes attention's output unquantized.
    for layer in attention:
        backend: Any = layer.attn_backend
        name = backend.get_name()
        if name not in ATTENTION_BACKENDS or backend.forward_includes_kv_cache_update:
            return False  # It does not store entries by themselves.
        if name in ONE_PLAN:
            return False  # It plans one batch a step.
    return True
