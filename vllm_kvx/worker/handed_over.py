"""What a KV connector that copies memory by address hands over of pages that end in a sidecar.

NIXL registers memory by the KV cache specs, and one server reads another's. It is told the pages'
keys and values alone: their length, with the whole page as the stride. So it reads from and for
servers whose pages have another sidecar, or none, as the other connectors do, and splits pages by
heads where servers differ in tensor parallelism. Sidecars are written again where a prompt arrives
(``Sidecars.plan``).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec


def hand_over_entries_alone(runner: Any) -> None:
    """Makes the connector of `runner`, vLLM's GPUModelRunner, leave sidecars out.

    Of connectors that go by tensors instead, which show keys and values alone, nothing changes.
    """
    stock = runner.initialize_kv_cache

    def initialize_kv_cache(*args: Any, **kwargs: Any) -> Any:
        if has_kv_transfer_group():
            _leave_sidecars_out(get_kv_transfer_group())
        return stock(*args, **kwargs)

    runner.initialize_kv_cache = initialize_kv_cache


def _leave_sidecars_out(connector: Any) -> None:
    worker: Any = getattr(connector, "connector_worker", None)
    if not hasattr(worker, "_layer_specs"):
        return
    specs = worker._layer_specs
    stock = connector.register_kv_caches

    def register_kv_caches(kv_caches: Mapping[str, Tensor]) -> None:
        worker._layer_specs = {name: _without_sidecar(spec) for name, spec in specs.items()}
        stock({name: _pages(cache) for name, cache in kv_caches.items()})

    connector.register_kv_caches = register_kv_caches


def _without_sidecar(spec: KVCacheSpec) -> KVCacheSpec:
    return replace(spec, page_size_padded=None) if isinstance(spec, AttentionSpec) else spec


def _pages(cache: Tensor) -> Tensor:
    """A layer's (blocks, ...) entries as NIXL can tell its blocks from other layers' memory.

    Where layers lie behind one another in one allocation, it wants all of a layer's pages, (blocks,
    numbers of a page), and still takes the length to copy from the spec.
    """
    stride = cache.stride(0)
    behind = cache.untyped_storage().nbytes() // cache.element_size() - len(cache) * stride
    return cache if 0 <= behind < stride else cache.as_strided((len(cache), stride), (stride, 1))
