"""What NIXL is told of pages that end in a sidecar, and which servers it lets meet."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  vLLM's stand-ins for pinned memory.
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvx.policy.layout import layout_of
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.storage import storage_of
from vllm_kvx.worker import handed_over
from vllm_kvx.worker.prefill.stash import Stash
from vllm_kvx.worker.requests import Requests
from vllm_kvx.worker.split_layers import Cuts

BLOCKS, HEADS, BLOCK, WIDTH, MORE = 5, 2, 4, 6, 10
PAGE = HEADS * BLOCK * WIDTH + MORE


def caches(layers: int) -> dict[str, torch.Tensor]:
    """Layers that lie behind one another in one allocation: entries of pages with a tail."""
    storage = torch.arange(layers * BLOCKS * PAGE, dtype=torch.float32)
    strides = PAGE, BLOCK * WIDTH, WIDTH, 1
    return {
        f"layer {layer}": storage.as_strided(
            (BLOCKS, HEADS, BLOCK, WIDTH), strides, layer * BLOCKS * PAGE
        )
        for layer in range(layers)
    }


class Connector:
    """Remembers what vLLM's would register."""

    def __init__(self, names: Any, num_groups: int = 1) -> None:
        layers = list(names)
        groups = [
            SimpleNamespace(layer_names=layers[first::num_groups]) for first in range(num_groups)
        ]
        spec = FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=HEADS,
            head_size=WIDTH // 2,
            dtype=torch.float32,
            page_size_padded=4 * PAGE,
        )
        specs = dict.fromkeys(names, spec)
        self.connector_worker = SimpleNamespace(
            _layer_specs=specs,
            device_kv_caches={},
            transfer_topo=None,
            kv_cache_config=SimpleNamespace(transfer_groups=groups),
            compat_hash=None,
            xfer_handshake_metadata=None,
        )
        self.registered: dict[str, torch.Tensor] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.registered = self.connector_worker.device_kv_caches = kv_caches
        worker = self.connector_worker
        worker.transfer_topo = SimpleNamespace(block_size=BLOCK, tp_size=2)
        worker.compat_hash = "stock"
        worker.xfer_handshake_metadata = SimpleNamespace(compatibility_hash="stock")


def start(
    connector: Any,
    monkeypatch: pytest.MonkeyPatch,
    caches: dict[str, Any],
    policy: str = "fier-64",
) -> None:
    """As a worker allocates its KV cache."""
    monkeypatch.setattr(handed_over, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(handed_over, "has_kv_transfer_group", lambda: connector is not None)
    transfer = SimpleNamespace(kv_connector="NixlConnector")
    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(kv_transfer_config=transfer),
        initialize_kv_cache=lambda: connector.register_kv_caches(caches),
    )
    handed_over.hand_over_entries(runner, layout_of([parse_policy(policy)], 8))
    runner.initialize_kv_cache()


@pytest.mark.parametrize("layers", [1, 3])
def test_pages_without_their_sidecars(monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    given = caches(layers)
    connector = Connector(given)
    start(connector, monkeypatch, given)
    for spec in connector.connector_worker._layer_specs.values():
        assert spec.page_size_bytes == 4 * (PAGE - MORE)
    for name, cache in connector.registered.items():
        assert cache.data_ptr() == given[name].data_ptr() and len(cache) == BLOCKS
        assert cache.stride(0) == PAGE
        # Of one layer among others its blocks are told by its pages.
        assert (cache.numel() == BLOCKS * PAGE) == (layers > 1)
    assert connector.connector_worker.device_kv_caches is given


def test_blocks_of_another_length(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = Connector(caches(1))
    start(connector, monkeypatch, caches(1))
    topology: Any = connector.connector_worker.transfer_topo
    assert topology.block_size_ratio(BLOCK) == 1
    for other in (BLOCK // 2, 2 * BLOCK):
        with pytest.raises(ValueError, match=f"of {other} tokens.*--block-size {BLOCK}"):
            topology.block_size_ratio(other)


def test_servers_that_retain_meet_their_like(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = {}
    for policy in ("fier-64", "snapkv:kv_rate=0.2", "knorm:kv_rate=0.3+fier-64"):
        given, connector = caches(2), Connector(caches(2))
        start(connector, monkeypatch, given, policy)
        worker: Any = connector.connector_worker
        hashes[policy] = worker.compat_hash
        assert worker.xfer_handshake_metadata.compatibility_hash == worker.compat_hash
        has_sidecar = "fier" in policy
        assert (connector.registered is given) != has_sidecar
        if policy != "fier-64":
            assert worker.transfer_topo.tp_ratio(2) == 1
            with pytest.raises(ValueError, match=r"on 4 ranks.*on 2: .*--tensor-parallel-size"):
                worker.transfer_topo.tp_ratio(4)
    assert hashes["fier-64"] == "stock"
    # Whatever they retain by: the policy of each request travels with it.
    assert len({*hashes.values()}) == 2


def test_servers_whose_groups_have_other_layers_do_not_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block of one would be read as if it held another's layers."""
    hashes = set()
    for num_groups in (1, 2, 3):
        connector = Connector(caches(3), num_groups)
        start(connector, monkeypatch, caches(3), "fastkv:tsp_layer=3")
        hashes.add(connector.connector_worker.compat_hash)
    assert len(hashes) == 3


@pytest.mark.parametrize(
    "name",
    ["snapkv:kv_rate=0.2,lookahead=4", "speed-4", "selfonly-4", "fastkv:tsp_layer=3,kv_rate=1"],
)
def test_prompts_that_another_server_has_computed(name: str) -> None:
    """Nothing of them is to come, and each stage has what it keeps."""
    policy, length = parse_policy(name), 4000
    layout = layout_of([policy], 8)
    cuts = Cuts((0, *layout.row_cuts), frozenset())
    stash = Stash(length, 1, torch.float32, torch.device("cpu"))
    requests = Requests(layout, cuts, 8, 4, 1, stash)
    assert not requests.add(0, "resumes", policy, length, 16, 0, num_computed=length // 2)
    assert requests.add(1, "comes", policy, length, 16, 0, num_computed=length)
    assert 1 not in requests.prompts
    found = requests.stored_lens(np.array([1]), np.array([length]))
    kept = [storage_of(policy, length, s, 16, 8).stored_len(length) for s in layout.stage_starts]
    assert found[:, 0].tolist() == kept and min(kept) < length


def test_no_connector_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM allocates a cache before there is one, to measure what CUDA graphs take."""
    monkeypatch.setattr(handed_over, "has_kv_transfer_group", lambda: False)
    monkeypatch.setattr(handed_over, "get_kv_transfer_group", lambda: pytest.fail("there is none"))
    transfer = SimpleNamespace(kv_connector="NixlConnector")
    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(kv_transfer_config=transfer),
        initialize_kv_cache=lambda: "allocated",
    )
    handed_over.hand_over_entries(runner, layout_of([parse_policy("fier-64")], 8))
    assert runner.initialize_kv_cache() == "allocated"


def test_what_vllm_calls_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered that would hand sidecars over, too."""
    connector = SimpleNamespace(connector_worker=SimpleNamespace())
    with pytest.raises(AttributeError):
        start(connector, monkeypatch, {})


@pytest.mark.parametrize("name", [None, "ExampleConnector"])
def test_other_connectors(name: str | None) -> None:
    transfer = None if name is None else SimpleNamespace(kv_connector=name)
    runner = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer))
    handed_over.hand_over_entries(runner, layout_of([parse_policy("fier-64")], 8))
    assert not hasattr(runner, "initialize_kv_cache")
