"""Steps that take no block: vLLM is not asked in them, and gives the same blocks in the others."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulation.client import AMPLE, Client
from simulation.server import Server
from simulation.servers import SERVERS
from simulation.traffic import VOCAB
from support import inside

ANSWER = 25
SPEED = "speed-2:anchors=2,tail=2"
POLICIES = {"speed": [SPEED, "full"], "fastkv": ["full", "snapkv:window=3,kv_rate=0.3,kv_floor=0"]}


def server_of(name: str) -> Server:
    return replace(SERVERS[name], layout=tuple(POLICIES[name]))


def run(server: Server, config: Any, policies: Sequence[str], is_async: bool) -> tuple[Any, ...]:
    """By step, each request's new blocks; all that was published; and how often vLLM was asked."""
    client = Client(server, config, replace(AMPLE, shares_prefixes=True, is_async=is_async))
    scheduler = client.engine.scheduler
    given, asked = inside.watch_blocks(scheduler), inside.count_allocations(scheduler)
    for number, length in enumerate((30, 33, 35, 41)):
        prompt = [(number + i) % VOCAB for i in range(length)]
        client.send(str(number), policies[number % len(policies)], prompt, answer=ANSWER)
    client.step(ANSWER - 1)
    published = inside.published_blocks(scheduler)
    client.order()
    return given, published, len(asked)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", list(POLICIES))
def test_blocks_are_the_same(
    name: str, is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, policies = server_of(name), POLICIES[name]
    config = server.config(tmp_path)
    inside.let_quiet_steps_be(monkeypatch)
    given, published, asked = run(server, config, policies, is_async)
    inside.ask_in_every_step(monkeypatch)
    all_given, all_published, all_asked = run(server, config, policies, is_async)
    assert given == all_given and published == all_published
    assert any(published.values()) and asked < 0.75 * all_asked, (asked, all_asked)


def test_a_wrong_forecast_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The debug switch compares: the simulation and engines of the tests have it on."""
    server = server_of("speed")
    config = server.config(tmp_path)
    inside.forecast_more_room(monkeypatch, tokens=1)
    with pytest.raises(RuntimeError, match="computed tokens should need nothing"):
        run(server, config, POLICIES["speed"], is_async=False)
