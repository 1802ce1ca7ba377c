"""Prompts that an LMCache server keeps, whose connector copies keys and values on a CPU, too."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reference.fier import Retrieve
from support.engine import BLOCK, Engine, keep_in_process, running
from support.expected import FULL, Policy, Read, named
from support.lmcache_server import CHUNK, lmcache_server, settle
from support.parity import ask, assert_close, assert_parity, room_for
from support.prompts import prompts_of

pytest.importorskip("lmcache", reason="needs lmcache, whose server keeps prompts")

# More than a group's, some of which is written by decode steps.
TOKENS = 34
FIER = Read(Retrieve(64, dense_below=0))
LENGTHS = (200, 70, 170, 300, 128)


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny()


@pytest.fixture(scope="module")
def connector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with lmcache_server(tmp_path_factory.mktemp("lmcache") / "log") as config:
        yield config


@pytest.fixture(scope="module")
def of_stock(model: Path, connector: dict[str, Any]) -> list[list[int]]:
    """Prompts that an engine without policies has stored."""
    prompts = prompts_of(LENGTHS, seed=31)
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_in_process(monkeypatch)
        with running(model, None, kv_transfer_config=connector) as stock:
            stock.generate(prompts, 1)
            settle(stock)
    return prompts


@pytest.fixture(scope="module")
def engine(model: Path, connector: dict[str, Any], of_stock: list[list[int]]) -> Iterator[Engine]:
    """Without prefixes of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_in_process(monkeypatch)
        room = room_for([FULL, FIER])
        with running(model, "full", config=room, kv_transfer_config=connector) as engine:
            yield engine


def stored(engine: Engine, prompts: list[list[int]], policy: Policy) -> Any:
    """Answers to prompts that were never asked before; then free blocks hold others' entries."""
    cold = ask(engine, prompts, [policy] * len(prompts), max_tokens=TOKENS)
    assert not any(answer.cached for answer in cold)
    settle(engine)
    others = prompts_of(LENGTHS, seed=99)
    ask(engine, others, [FULL] * len(others), max_tokens=1)
    settle(engine)
    return cold


def lens(prompts: list[list[int]]) -> list[int]:
    """What is loaded of each: whole chunks, and no prompt to its last token."""
    return [len(p) // CHUNK * CHUNK - (len(p) % CHUNK == 0) for p in prompts]


@pytest.mark.parametrize(("before", "after"), [(FULL, FIER), (FIER, FULL), (FIER, FIER)])
def test_what_one_stores_another_loads(
    engine: Engine, model: Path, before: Policy, after: Policy
) -> None:
    """Codes of keys that were loaded are made here: LMCache leaves a page's tail alone."""
    prompts = prompts_of(LENGTHS, seed=len(named(before)) + 2 * len(named(after)))
    cold = stored(engine, prompts, before)
    loaded = ask(engine, prompts, [after] * len(prompts), max_tokens=TOKENS)
    assert [answer.cached for answer in loaded] == lens(prompts)
    assert_parity(model, [*cold, *loaded], [before] * len(cold) + [after] * len(loaded))
    if before == after:
        assert_close(loaded, cold)
    settle(engine)
    engine.assert_idle()


def test_answers_are_not_stored(engine: Engine, model: Path) -> None:
    """What follows on an answer under retrieval finds the prompt of that, and no more."""
    prompts = prompts_of((192, 64), seed=21)
    asked = stored(engine, prompts, FIER)
    longer = [a.prompt + a.tokens + [3, 5, 7] for a in asked]
    answers = ask(engine, longer, [FIER] * 2, max_tokens=4)
    assert [answer.cached for answer in answers] == [192, 64]
    assert_parity(model, answers, FIER)
    settle(engine)
    engine.assert_idle()


def test_one_that_comes_back_loads_nothing(engine: Engine, model: Path) -> None:
    """Nor does LMCache take what it has of it for loaded, however often it is asked."""
    prompts = prompts_of(LENGTHS, seed=7)
    undisturbed = stored(engine, prompts, FIER)
    ids = engine.submit(prompts, TOKENS, [named(FIER)] * len(prompts))
    while any(not request.num_output_tokens for request in engine.scheduler.requests.values()):
        engine.step()
    engine.throw_out()
    connector = engine.scheduler.connector
    for _ in range(20):
        for request in engine.scheduler.requests.values():
            assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
            assert not connector.request_trackers[request.request_id].num_lmcache_hit_tokens
        time.sleep(0.005)  # For an answer of the server's, were it asked.
    engine.finish()
    assert [engine.answered[i] for i in ids] == [answer.tokens for answer in undisturbed]
    settle(engine)
    # What it has stored anew is the same.
    loaded = ask(engine, prompts, [FULL] * len(prompts), max_tokens=4)
    assert [answer.cached for answer in loaded] == lens(prompts)
    assert_parity(model, loaded, FULL)
    settle(engine)
    engine.assert_idle()


@pytest.mark.parametrize("policy", [FULL, FIER])
def test_one_that_skips_the_prefix_cache(engine: Engine, model: Path, policy: Policy) -> None:
    """For logprobs of its prompt, of which another one has stored the first chunk.

    Steps end within blocks of its other chunks, which are to be stored once they are computed.
    """
    known, other = prompts_of((CHUNK + 5, 200), seed=41 + (policy is FIER))
    stored(engine, [known], FULL)
    prompt = known[:CHUNK] + other[CHUNK:]
    # Beside one that takes a token of each step.
    beside = engine.submit([[3, 5, 7]], 40, [named(FULL)])
    while not any(request.num_output_tokens for request in engine.scheduler.requests.values()):
        engine.step()
    (asked,) = engine.submit([prompt], 1, [named(policy)], prompt_logprobs=0)
    (request,) = (r for r in engine.scheduler.requests.values() if r.num_prompt_tokens == 200)
    connector = engine.scheduler.connector
    for _ in range(20):  # As in every step in which there are no blocks for it.
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        assert not connector.request_trackers[request.request_id].num_lmcache_hit_tokens
        time.sleep(0.005)  # For an answer of the server's, were it asked.
    ends = []
    while asked not in engine.answered:
        engine.step()
        ends.append(request.num_computed_tokens)
    assert any(end % BLOCK for end in ends if CHUNK < end < len(prompt))
    engine.finish()
    assert len(engine.answered[beside[0]]) == 40
    settle(engine)
    loaded = ask(engine, [prompt] * 2, [FULL, FIER], max_tokens=TOKENS)
    assert [answer.cached for answer in loaded] == lens([prompt] * 2)
    assert_parity(model, loaded, [FULL, FIER])
    settle(engine)
    engine.assert_idle()


def test_what_a_stock_server_stores(engine: Engine, model: Path, of_stock: list[list[int]]) -> None:
    """Its pages have no tail."""
    loaded = ask(engine, of_stock, [FIER] * len(of_stock), max_tokens=TOKENS)
    assert [answer.cached for answer in loaded] == lens(of_stock)
    assert_parity(model, loaded, FIER)
    settle(engine)
    engine.assert_idle()
