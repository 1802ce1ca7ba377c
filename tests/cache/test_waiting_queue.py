"""Who begins when prompts wait for the stash; schedulers run without a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from simulation.engine import Engine
from simulation.servers import Case, Server
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_kvx.policy.storage import STASH_PAGE
from vllm_kvx.settings import POLICY_KEY

FASTKV = "fastkv:tsp_layer=3,window=3,kernel=3"
# The stash holds three pages. Prompts come in by chunks, several in a step.
SERVER = Server(FASTKV, ("snapkv:window=8",), (), stash=3 * STASH_PAGE, max_len=160)
CASE = Case(
    is_async=False,
    by_priority=False,
    shares_prefixes=False,
    reserves_prompts=True,
    max_seqs=8,
    max_batch=64,
    max_chunk=7,
    num_blocks=1000,
    resets=0,
    copies_pages=False,
)
ONE_PAGE, TWO_PAGES, THREE_PAGES = 40, 120, 140


class Client:
    """Sends requests to an engine and notes in which step each began."""

    def __init__(self, config: VllmConfig, case: Case) -> None:
        self.engine = Engine(SERVER, config, case)
        self.began: dict[str, int] = {}
        self._steps = self._sent = 0

    def send(self, name: str, policy: str, tokens: int, answer: int = 2, priority: int = 0) -> None:
        params = SamplingParams(
            max_tokens=answer, ignore_eos=True, temperature=0.0, extra_args={POLICY_KEY: policy}
        )
        self._sent += 1
        prompt = [self._sent] * tokens
        arrival = float(self._sent)
        self.engine.add(Request(name, prompt, params, None, arrival, priority=priority))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for name in self.engine.advance():
                self.began.setdefault(name, self._steps)
            self._steps += 1

    def until_begun(self, name: str) -> None:
        for _ in range(1000):
            if name in self.began:
                return
            self.step()
        pytest.fail(f"{name} never begins")

    def order(self) -> Sequence[str]:
        """Requests in the order in which they began, once all have ended."""
        for _ in range(1000):
            if not self.engine.live:
                break
            self.step()
        self.engine.finish()
        return sorted(self.began, key=lambda name: self.began[name])


Connect = Callable[..., Client]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return SERVER.config(tmp_path_factory.mktemp("server"))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def connect(request: pytest.FixtureRequest, config: VllmConfig, one_thread: None) -> Connect:
    def connected(**case: object) -> Client:
        return Client(config, replace(CASE, is_async=request.param, **case))  # type: ignore[arg-type]

    return connected


def test_those_that_need_no_stash_begin_at_once(connect: Connect) -> None:
    client = connect()
    client.send("first", FASTKV, TWO_PAGES)
    client.send("second", FASTKV, TWO_PAGES)
    for name in "abc":
        client.send(name, "full", 10)
    client.step()
    assert client.began == dict.fromkeys(("first", "a", "b", "c"), 0)
    client.until_begun("second")
    # Its first chunk runs once the other's last has: that step is the one before.
    assert client.began["second"] == -(-(TWO_PAGES - 3) // 7) + 1
    client.order()


def test_nobody_takes_pages_that_one_ahead_needs(connect: Connect) -> None:
    """A page is free all the time."""
    client = connect()
    client.send("runs", FASTKV, TWO_PAGES)
    client.send("waits", FASTKV, TWO_PAGES)
    client.send("small", FASTKV, ONE_PAGE)
    client.send("retains", "snapkv:window=8", ONE_PAGE)
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
    client.send("full", "full", 10, priority=2)
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
        client.send(str(number), "full", 40, answer=20)
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
