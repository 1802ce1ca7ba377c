"""What policies use of LMCache 0.5.6, for tests of our own code where it is not installed."""

import sys
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class LMCacheMPRequestState(Enum):
    """Those in which a request is new, admitted, or to load nothing."""

    PREFETCHING = auto()
    READY = auto()
    BYPASS_LMCACHE = auto()


class LMCacheMPRequestMetadata:
    """What is to be stored or loaded."""

    @staticmethod
    def GetStoreMetadata(tracker: Any, *, save_decode_cache: bool = False) -> None:
        """By default generated tokens are left out."""


class LMCacheMPConnector:
    """One whose server has `hits` tokens of every prompt."""

    def __init__(self, hits: int = 0) -> None:
        self.hits, self.request_trackers = hits, dict[str, Any]()

    def _get_or_create_request_tracker(self, request: Any) -> Any:
        new = SimpleNamespace(state=LMCacheMPRequestState.PREFETCHING, num_stored_tokens=0)
        return self.request_trackers.setdefault(request.request_id, new)

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Takes what is found for stored."""
        self._get_or_create_request_tracker(request).num_stored_tokens = self.hits
        return self.hits - computed, True


def take_lmcache(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """Has these be imported as LMCache's; the modules of the metadata and of the connector."""
    monkeypatch.delenv("LMCACHE_USE_UPSTREAM_MP", raising=False)
    metadata, connector = ModuleType("metadata"), ModuleType("connector")
    metadata.__dict__.update(
        LMCacheMPRequestState=LMCacheMPRequestState,
        LMCacheMPRequestMetadata=LMCacheMPRequestMetadata,
    )
    connector.__dict__.update(LMCacheMPConnector=LMCacheMPConnector)
    parts = "lmcache", "lmcache.integration", "lmcache.integration.vllm"
    modules = {name: ModuleType(name) for name in parts}
    modules[f"{parts[-1]}.lmcache_mp_metadata"] = metadata
    modules[f"{parts[-1]}.lmcache_mp_connector"] = connector
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return metadata, connector
