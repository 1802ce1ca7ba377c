"""Drafts under asynchronous scheduling: a step is planned before the last one's drafts are known.

The host knows the most tokens that a request can have; the device knows how many there are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.pyramidkv import Pyramid
from reference.structkv import Struct
from support.engine import running, schedule_ahead
from support.expected import FULL, Policy, Speed
from support.heads import Models, drafted_by
from support.nightly import by_day
from support.parity import room_for

from .test_draft_models import assert_drafts

RETAIN: list[Policy] = [FULL, Keep(kv_rate=0.4), Critical(kv_rate=0.3), Pyramid(kv_rate=0.5)]
PROPAGATE: list[Policy] = [
    FULL,
    Speed(4),
    Keep(tsp_layer=3, tsp_rate=0.4, kv_rate=0.4),
    Struct(pivot=3, struct_rate=0.4, kv_rate=0.4),
]
ROOM: dict[str, Any] = {"max_model_len": 256, "enable_prefix_caching": True}


def ahead(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "async_scheduling"}


@pytest.fixture(autouse=True)
def planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_ahead(monkeypatch, True)


@pytest.mark.parametrize("policies", [RETAIN, PROPAGATE], ids=["retain", "propagate"])
def test_a_draft_model(tiny: Callable[..., Path], policies: list[Policy]) -> None:
    model, draft = tiny(), tiny(seed=3)
    drafter = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    with running(
        model, "full", config=room_for(policies), speculative_config=drafter, **ROOM
    ) as engine:
        assert_drafts(engine, model, policies, tokens=12)


@pytest.mark.parametrize("method", by_day(("eagle3", "eagle", "mtp"), {0}))
def test_heads(tiny: Callable[..., Path], tmp_path: Path, method: Any) -> None:
    models = Models.of(tiny, tmp_path, method)
    options = ahead(drafted_by(models.head, method, 3, **ROOM))
    with running(models.served, "full", config=room_for(RETAIN), **options) as engine:
        assert_drafts(engine, models.model, RETAIN, tokens=12)
