"""Which requests find nothing at a KV connector, and what LMCache's is told of them."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.lmcache_standin import LMCacheMPConnector, LMCacheMPRequestState

from vllm_kvx.cache.external_prefixes import limit_external_hits


class ExampleConnector(LMCacheMPConnector):
    """One of another kind."""


def request_that(skips: bool) -> Any:
    return SimpleNamespace(request_id="a", skip_reading_prefix_cache=skips)


def test_what_a_request_may_load_it_finds() -> None:
    connector = LMCacheMPConnector(hits=64)
    limit_external_hits(connector, lambda request: True)
    assert connector.get_num_new_matched_tokens(request_that(skips=False), 32) == (32, True)
    tracker = connector.request_trackers["a"]
    assert tracker.state is LMCacheMPRequestState.PREFETCHING and tracker.num_stored_tokens == 64


@pytest.mark.parametrize(("skips", "may_load"), [(True, True), (True, False), (False, False)])
def test_lmcache_passes_by_what_may_load_nothing(skips: bool, may_load: bool) -> None:
    """However often it is asked: nothing of the prompt is taken for stored."""
    connector = LMCacheMPConnector(hits=64)
    limit_external_hits(connector, lambda request: may_load)
    for _ in range(2):
        assert connector.get_num_new_matched_tokens(request_that(skips), 0) == (0, False)
        tracker = connector.request_trackers["a"]
        assert tracker.state is LMCacheMPRequestState.BYPASS_LMCACHE
        assert not tracker.num_stored_tokens


def test_others_are_asked_and_not_heard() -> None:
    connector = ExampleConnector(hits=64)
    limit_external_hits(connector, lambda request: False)
    assert connector.get_num_new_matched_tokens(request_that(skips=False), 0) == (0, False)
    assert connector.request_trackers["a"].state is LMCacheMPRequestState.PREFETCHING
