"""What a start with LMCache's connector is refused for; vLLM imports it while it configures."""

from typing import Any

import pytest
import torch
from support.refused import lines_of

pytest.importorskip("lmcache", reason="needs lmcache, whose connector is asked for")


def lines(make_config: Any, policy: str, extra: dict[str, Any], **settings: Any) -> list[str]:
    """Whether the server runs the policy or has room for it."""
    settings["kv_transfer_config"] = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    found = lines_of(make_config, policy, **settings)
    room = {"additional_config": {"kv_layout": [policy]}}
    assert lines_of(make_config, "full", **settings, **room) == found
    return found


@pytest.mark.parametrize("policy", ["fier-64", "quest-64"])
def test_whole_prompts(make_config: Any, policy: str) -> None:
    assert not lines(make_config, policy, {"lmcache.mp.save_decode_cache": False})


@pytest.mark.parametrize("policy", ["snapkv:kv_rate=0.1", "speed-4", "fastkv:tsp_layer=3"])
def test_what_keeps_a_part(make_config: Any, policy: str) -> None:
    (line,) = lines(make_config, policy, {})
    assert "hands over what is kept" in line


@pytest.mark.parametrize("key", ["lmcache.mp.save_decode_cache", "lmcache.mp.lazy_offload"])
def test_what_it_is_not_to_do(make_config: Any, key: str) -> None:
    (line,) = lines(make_config, "fier-64", {key: True})
    assert f"drop {key}" in line


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a row of servers on GPUs")
@pytest.mark.parametrize("policy", ["fier-64", "quest-64"])
def test_engines_do_not_copy(make_config: Any, policy: str) -> None:
    key = "lmcache.mp.mp_transfer_mode"
    (line,) = lines(make_config, policy, {key: "engine_driven"})
    assert f"drop {key}" in line


def test_adapters(make_config: Any) -> None:
    (line,) = lines(make_config, "fier-64", {}, enable_lora=True)
    assert "drop --enable-lora" in line


def test_a_connector_that_stores_answers(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own, of before LMCache had one, stores whatever is computed."""
    monkeypatch.setenv("LMCACHE_USE_UPSTREAM_MP", "1")
    (line,) = lines(make_config, "fier-64", {})
    assert "leave LMCACHE_USE_UPSTREAM_MP unset" in line
