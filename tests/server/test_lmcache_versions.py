"""Which LMCache a server with policies takes; a stand-in has what they use of it."""

from typing import Any

import pytest
from support.lmcache_standin import (
    LMCacheMPConnector,
    LMCacheMPRequestMetadata,
    LMCacheMPRequestState,
    take_lmcache,
)
from support.refused import OfLMCache, changed

from vllm_kvx.server.connector_checks import BESIDE_CONNECTORS
from vllm_kvx.server.start_refusal import reasons


def lines(stock: Any) -> list[str]:
    return reasons(BESIDE_CONNECTORS, changed(stock, "kv_transfer_config", OfLMCache()))


def test_one_that_has_all(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take_lmcache(monkeypatch)
    assert not lines(stock)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (LMCacheMPConnector, "_get_or_create_request_tracker"),
        (LMCacheMPRequestMetadata, "GetStoreMetadata"),
    ],
)
def test_one_that_lacks_a_method(
    stock: Any, monkeypatch: pytest.MonkeyPatch, of: type, name: str
) -> None:
    take_lmcache(monkeypatch)
    monkeypatch.delattr(of, name)
    (line,) = lines(stock)
    assert "pip install lmcache==0.5.6" in line and "\n" not in line


def test_one_that_stores_answers(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take_lmcache(monkeypatch)
    monkeypatch.setattr(LMCacheMPRequestMetadata, "GetStoreMetadata", lambda tracker: None)
    (line,) = lines(stock)
    assert "is to store prompts alone" in line


def test_one_that_passes_no_request_by(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, _ = take_lmcache(monkeypatch)
    states: Any = metadata
    states.LMCacheMPRequestState = {s.name for s in LMCacheMPRequestState} - {"BYPASS_LMCACHE"}
    (line,) = lines(stock)
    assert "to let requests pass by" in line


def test_one_that_has_no_connector(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes its own then."""
    _, connector = take_lmcache(monkeypatch)
    del connector.LMCacheMPConnector
    assert len(lines(stock)) == 1


def test_vllms_own(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take_lmcache(monkeypatch)
    monkeypatch.setenv("LMCACHE_USE_UPSTREAM_MP", "1")
    (line,) = lines(stock)
    assert "leave LMCACHE_USE_UPSTREAM_MP unset" in line
