"""What a start says of a KV connector whose package vLLM does not find."""

import importlib.util
from typing import Any

import pytest
from support.refused import lines_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lmcache") is not None, reason="lmcache is installed"
)

LMCACHE = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    "asked",
    [
        {"kv_transfer_config": LMCACHE},
        {"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"},
    ],
)
@pytest.mark.parametrize("policy", ["fier-64", "quest-64", "auto"])
def test_says_what_to_install(make_config: Any, policy: str, asked: dict[str, Any]) -> None:
    (line,) = lines_of(make_config, policy, **asked)
    assert "(No module named 'lmcache'): pip install lmcache==0.5.6" in line


@pytest.mark.parametrize("policy", ["snapkv:kv_rate=0.1", "speed-4"])
def test_nobody_installs_in_vain(make_config: Any, policy: str) -> None:
    room = {"additional_config": {"kv_layout": [policy]}}
    for server, more in ((policy, {}), ("fier-64", room)):
        (line,) = lines_of(make_config, server, kv_transfer_config=LMCACHE, **more)
        assert "hands over what is kept" in line and "install" not in line


def test_a_connector_that_no_policy_knows(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    def missing() -> type:
        raise ModuleNotFoundError("No module named 'mooncake'")

    monkeypatch.setitem(KVConnectorFactory._registry, "MooncakeConnector", missing)
    asked = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
    (line,) = lines_of(make_config, "fier-64", kv_transfer_config=asked)
    assert "and no other: name one of these" in line


@pytest.mark.parametrize("policy", [None, "full"])
def test_stock_vllm_says_it_itself(make_config: Any, policy: str | None) -> None:
    with pytest.raises(ModuleNotFoundError, match="lmcache"):
        make_config(policy, kv_transfer_config=LMCACHE)


def test_what_else_is_missing_is_not_the_connectors(make_config: Any) -> None:
    asked = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "module_that_is_not_there",
    }
    with pytest.raises(ModuleNotFoundError, match="module_that_is_not_there"):
        make_config("fier-64", kv_transfer_config=asked)
