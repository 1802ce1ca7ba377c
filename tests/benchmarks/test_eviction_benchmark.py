"""What stays in the prefix cache, replayed through the scheduler: more sessions than it holds."""

from pathlib import Path

import pytest

from benchmarks.engine.compare import prepare_model
from benchmarks.serving.eviction import MODEL, Load, Replay

# Prompts of these sessions grow beyond the pool by a little.
SHORT = Load(3000, 8, 120, 1024, 8192, 480)
# These never do, though nothing else is cached for long than what comes back.
AMPLE = Load(20000, 4, 60, 1024, 8192, 480)
FASTKV, SNAPKV = "fastkv:tsp_layer=15", "snapkv:kv_rate=0.1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    _, options = prepare_model(MODEL, tmp_path_factory.mktemp("model"))
    return str(options["model"])


def hit_rate(policy: str, eviction: str | None, load: Load, model: str) -> float:
    return Replay(policy, eviction, load, 0, model).run()["hit_rate"]


@pytest.mark.parametrize("policy", [SNAPKV, FASTKV])
def test_nothing_changes_where_nothing_is_lost(policy: str, model: str) -> None:
    """Though hits end before what is cached: before the window, at whole blocks of states."""
    by_use, adaptive = (hit_rate(policy, each, AMPLE, model) for each in ("lru", "adaptive"))
    assert by_use == adaptive > 0.8


def test_sessions_that_a_pool_is_short_of_find_more(model: str) -> None:
    by_use, adaptive = (hit_rate(SNAPKV, each, SHORT, model) for each in ("lru", "adaptive"))
    assert adaptive > by_use + 0.05


def test_lru_is_stock(model: str) -> None:
    assert hit_rate("full", "lru", SHORT, model) == hit_rate("stock", None, SHORT, model)


def test_sessions_that_end_do_not_stay(model: str, tmp_path: Path) -> None:
    """Most ask once: what they leave behind is not kept at the expense of those who come back."""
    load = Load(3000, 8, 150, 1024, 8192, 480, stays=0.9, once=0.6)
    by_use, adaptive = (hit_rate(SNAPKV, each, load, model) for each in ("lru", "adaptive"))
    assert adaptive > by_use - 0.05
