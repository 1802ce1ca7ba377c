"""Who begins when prompts wait for the stash; schedulers run without a model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulation.client import AMPLE, Client
from simulation.server import Server
from vllm.config import VllmConfig

from vllm_kvx.policy.storage import STASH_PAGE

FASTKV = "fastkv:tsp_layer=3,window=3,kernel=3,kv_floor=0"
# The stash holds three pages. Prompts come in by chunks, several in a step.
SERVER = Server(FASTKV, ("snapkv:window=8,kv_floor=0",), (), stash=3 * STASH_PAGE, max_len=160)
CASE = replace(AMPLE, max_batch=64, max_chunk=7)
ONE_PAGE, TWO_PAGES, THREE_PAGES, SHORT = [1] * 40, [1] * 120, [1] * 140, [1] * 10


Connect = Callable[..., Client]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return SERVER.config(tmp_path_factory.mktemp("server"))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def connect(request: pytest.FixtureRequest, config: VllmConfig, one_thread: None) -> Connect:
    def connected(**case: Any) -> Client:
        return Client(SERVER, config, replace(CASE, is_async=request.param, **case))

    return connected


def test_those_that_need_no_stash_begin_at_once(connect: Connect) -> None:
    client = connect()
    client.send("first", FASTKV, TWO_PAGES)
    client.send("second", FASTKV, TWO_PAGES)
    for name in "abc":
        client.send(name, "full", SHORT)
    client.step()
    assert client.began == dict.fromkeys(("first", "a", "b", "c"), 0)
    client.until_begun("second")
    # Its first chunk runs once the other's last has: that step is the one before.
    assert client.began["second"] == -(-(len(TWO_PAGES) - 3) // 7) + 1
    client.order()


def test_nobody_takes_pages_that_one_ahead_needs(connect: Connect) -> None:
    """A page is free all the time."""
    client = connect()
    client.send("runs", FASTKV, TWO_PAGES)
    client.send("waits", FASTKV, TWO_PAGES)
    client.send("small", FASTKV, ONE_PAGE)
    client.send("retains", "snapkv:window=8,kv_floor=0", ONE_PAGE)
    client.step()
    assert set(client.began) == {"runs", "retains"}
    assert client.order()[2:] == ["waits", "small"]
    assert client.began["waits"] == client.began["small"], "both have room then"


def test_priorities_decide_who_is_ahead(connect: Connect) -> None:
    client = connect(by_priority=True)
    client.send("runs", FASTKV, TWO_PAGES, priority=1)
    client.step()
    client.send("late", FASTKV, TWO_PAGES, priority=2)
    client.step()
    client.send("later", FASTKV, THREE_PAGES, priority=1)
    client.send("full", "full", SHORT, priority=2)
    client.send("urgent", FASTKV, ONE_PAGE, priority=0)
    client.step()
    assert set(client.began) == {"runs", "full", "urgent"}
    assert client.order()[3:] == ["later", "late"]


def test_an_aborted_one_makes_room(connect: Connect) -> None:
    client = connect()
    client.send("runs", FASTKV, TWO_PAGES)
    client.send("waits", FASTKV, TWO_PAGES)
    client.send("small", FASTKV, ONE_PAGE)
    client.step(2)
    assert set(client.began) == {"runs"}
    client.engine.abort("waits")
    client.step()
    assert client.began["small"] == 2
    assert client.order() == ["runs", "small"]


def test_preempted_ones_keep_their_place(connect: Connect) -> None:
    client = connect()
    client.send("first", FASTKV, TWO_PAGES)
    client.send("second", FASTKV, ONE_PAGE)
    client.send("third", FASTKV, ONE_PAGE)
    client.step(3)
    assert set(client.began) == {"first", "second"}
    client.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    client.began.clear()
    assert client.order() == ["first", "second", "third"]
    assert client.began["first"] == client.began["second"] < client.began["third"]


def test_one_that_was_passed_over_blocks_the_queue_once_it_has_pages(connect: Connect) -> None:
    """Requests that need no stash come without end, and take all blocks while a prompt waits.

    As soon as it waits for blocks alone, it is the head of vLLM's queue, and nobody passes it.
    """
    client = connect(num_blocks=SERVER.num_groups * 60 + 1)
    client.send("runs", FASTKV, TWO_PAGES)
    client.send("waits", FASTKV, THREE_PAGES)
    has_room: int | None = None
    for number in range(400):
        client.send(str(number), "full", ONE_PAGE, answer=20)
        client.step()
        if has_room is None and not client.engine.stash_pages:
            has_room = number
        if "waits" in client.began:
            break
    assert has_room is not None, "others' blocks are not what it waits for"
    assert sum(step < has_room for step in client.began.values()) > 3, "others begin meanwhile"
    assert not [n for n, step in client.began.items() if has_room <= step < client.began["waits"]]
    for name in [*client.engine.live]:
        client.engine.abort(name)
    client.order()
