"""What a KV connector that copies memory by address hands over, and to whom.

NIXL registers memory by the KV cache specs, and one server reads another's. Where pages end in a
sidecar it is told of keys and values alone: their length, with the whole page as the stride. So it
reads from and for servers whose pages have another sidecar, or none, as the other connectors do.
Sidecars are written again where a prompt arrives (``Sidecars.plan``).

Under policies that retain or propagate, what arrives is what was kept, which the scheduler knows
to use (``cache/handed_over.py``). Servers without such policies do not, so the two do not meet.
"""

import hashlib
from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from vllm_kvx.policy.layout import Layout

# Of what servers hand over that keep a part, which both of them have to know.
_FORMAT = "vllm-kvx, entries that are kept, 2"


def hand_over_entries(runner: Any, layout: Layout) -> None:
    """Makes the connector of `runner`, vLLM's GPUModelRunner, hand over what suits the policies.

    layout: the server's. Of connectors that go by tensors, which show keys and values alone,
    nothing changes.
    """
    transfer = runner.vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != "NixlConnector":
        return
    stock = runner.initialize_kv_cache

    def initialize_kv_cache(*args: Any, **kwargs: Any) -> Any:
        # Not while vLLM measures what CUDA graphs take, over a cache that it throws away.
        if has_kv_transfer_group():
            _change(get_kv_transfer_group(), layout)
        return stock(*args, **kwargs)

    runner.initialize_kv_cache = initialize_kv_cache


def _change(connector: Any, layout: Layout) -> None:
    worker: Any = connector.connector_worker
    # Not by a default: without them sidecars would travel, and pages be split where they are not.
    specs, _ = worker._layer_specs, worker.device_kv_caches
    stock = connector.register_kv_caches

    def register_kv_caches(kv_caches: dict[str, Tensor]) -> None:
        if layout.sidecar is None:
            stock(kv_caches)
        else:
            worker._layer_specs = {name: _without_sidecar(spec) for name, spec in specs.items()}
            stock({name: _pages(cache) for name, cache in kv_caches.items()})
            # What it does to blocks that have come it does to entries.
            worker.device_kv_caches = kv_caches
        _want_equal_blocks(worker.transfer_topo)
        if not layout.keeps_prompts:
            _meet_servers_that_keep_a_part(worker)

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


def _meet_servers_that_keep_a_part(worker: Any) -> None:
    """Others would take what was kept for a whole prompt, or hand over one, and are not met.

    Nor are servers whose KV groups have other layers: a block holds those of its group, one behind
    the other, and would be read as if it held this one's. NIXL compares hashes when it meets
    another server. It treats one that it does not meet as a load that failed.
    """
    groups = [group.layer_names for group in worker.kv_cache_config.transfer_groups]
    told = f"{worker.compat_hash} {_FORMAT} {groups}"
    worker.compat_hash = hashlib.sha256(told.encode()).hexdigest()
    worker.xfer_handshake_metadata.compatibility_hash = worker.compat_hash
    topology = worker.transfer_topo
    own = topology.tp_size

    def tp_ratio(remote: int) -> int:
        if remote != own:
            raise ValueError(
                f"the server that prefills runs on {remote} ranks, and this one, whose KV policies "
                f"keep a part of prompts, on {own}: start both with one --tensor-parallel-size"
            )
        return 1

    topology.tp_ratio = tp_ratio


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
