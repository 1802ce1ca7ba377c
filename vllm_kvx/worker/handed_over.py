"""What a KV connector that copies memory by address hands over of pages that end in a sidecar.

NIXL registers memory by the KV cache specs, and one server reads another's. It is told the pages'
keys and values alone: their length, with the whole page as the stride. So it reads from and for
servers whose pages have another sidecar, or none, as the other connectors do. Sidecars are written
again where a prompt arrives (``Sidecars.plan``).
"""

from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec


def hand_over_entries_alone(runner: Any) -> None:
    """Makes the connector of `runner`, vLLM's GPUModelRunner, leave sidecars out.

    Of connectors that go by tensors instead, which show keys and values alone, nothing changes.
    """
    transfer = runner.vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != "NixlConnector":
        return
    stock = runner.initialize_kv_cache

    def initialize_kv_cache(*args: Any, **kwargs: Any) -> Any:
        _leave_sidecars_out(get_kv_transfer_group())
        return stock(*args, **kwargs)

    runner.initialize_kv_cache = initialize_kv_cache


def _leave_sidecars_out(connector: Any) -> None:
    worker: Any = connector.connector_worker
    # Not by a default: without them sidecars would travel, and pages be split where they are not.
    specs, _ = worker._layer_specs, worker.device_kv_caches
    stock = connector.register_kv_caches

    def register_kv_caches(kv_caches: dict[str, Tensor]) -> None:
        worker._layer_specs = {name: _without_sidecar(spec) for name, spec in specs.items()}
        stock({name: _pages(cache) for name, cache in kv_caches.items()})
        # What it does to blocks that have come it does to entries.
        worker.device_kv_caches = kv_caches
        _want_equal_blocks(worker.transfer_topo)

    connector.register_kv_caches = register_kv_caches


def _want_equal_blocks(topology: Any) -> None:
    """Blocks of another length would come as parts of one, which NIXL puts together in whole pages.

    topology: NIXL's, which it asks when it meets another server.
    """
    own = topology.block_size

    def block_size_ratio(remote: int) -> int:
        if remote != own:
            raise ValueError(
                f"the server that prefills has KV blocks of {remote} tokens, and this one, whose "
                f"KV policies want its own length, of {own}: start that one with --block-size {own}"
            )
        return 1

    topology.block_size_ratio = block_size_ratio


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
