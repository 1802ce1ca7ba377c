"""Prompts that retention compacts share prefixes: a hit answers as a cold run does, bit for bit.

Requests with a cache salt of their own run cold on the same server.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.knorm import Norm
from reference.pyramidkv import Pyramid
from reference.structkv import Struct
from reference.structsnap import StructSnap
from support import inside
from support.engine import BLOCK, Answer, Engine, keep_in_process, running
from support.expected import FULL, Policy, named
from support.nightly import by_day
from support.parity import assert_close, assert_parity, room_for
from support.prompts import prompt_of, prompts_of

RETAIN: list[Policy] = [
    Keep(kv_rate=0.3),
    Norm(kv_rate=0.4),
    Keep(sinks=4, recent=60),
    Critical(kv_rate=0.3, window=4),
    Pyramid(kv_rate=0.3, groups=4),
    FULL,
]
SELECT: list[Policy] = [
    Keep(tsp_layer=3, tsp_rate=0.4, kv_rate=0.2),
    Struct(5, struct_rate=0.5, kv_rate=0.3),
    StructSnap(3, struct_rate=0.5, kv_rate=0.2),
]
BLOCKS: list[Policy] = [Struct(3, struct_rate=0.5, kv_rate=0.3, block_size=BLOCK), FULL]
SERVERS = {"retain": RETAIN, "select": SELECT, "blocks": BLOCKS}
NAMES = [named(policy) for policy in RETAIN]


def cases(chosen: Sequence[tuple[str, Policy]], *days: Policy) -> Any:
    """These policies of these servers; tests of one server share its engine.

    days: those that do not wait for the night. Each kind of score and of what is kept has some of
    the tests by day: by attention, by norms, by position, by groups of layers, with hidden states,
    in whole blocks, and all.
    """
    policies = [policy for _, policy in chosen]
    return pytest.mark.parametrize(
        ("engine", "policy"),
        by_day(chosen, {policies.index(policy) for policy in days}),
        indirect=["engine"],
        ids=[f"{server}-{named(policy)}" for server, policy in chosen],
    )


EACH = [(server, policy) for server, policies in SERVERS.items() for policy in policies]
SOME = [("retain", RETAIN[2]), ("retain", RETAIN[4]), ("select", SELECT[0]), ("blocks", BLOCKS[0])]


_RUNS = count()


def cold(engine: Engine, prompts: Sequence[list[int]], policies: Any, **kw: Any) -> list[Answer]:
    """Under salts that nobody shares."""
    salts = [str(next(_RUNS)) for _ in prompts]
    answers = engine.generate(prompts, policies=policies, cache_salt=salts, **kw)
    assert not any(answer.cached for answer in answers)
    return answers


def floor(tokens: int, engine: Engine, policy: Policy) -> int:
    """In whole blocks of what a prefix consists of: keys and values, or hidden states too."""
    grain = inside.state_tokens(engine) if selects(policy) else BLOCK
    return max(tokens, 0) // grain * grain


def selects(policy: Policy) -> bool:
    """Whether it needs hidden states of the tokens that it takes."""
    return getattr(policy, "tsp_layer", None) is not None or isinstance(policy, Struct | StructSnap)


def text_of(policy: Policy, seed: int) -> list[int]:
    """A prompt of which a hit may take something."""
    return prompt_of(290 if selects(policy) else 170, seed + len(named(policy)))


def window(policy: Policy) -> int:
    """Last prompt tokens that a request computes itself."""
    if policy == FULL or getattr(policy, "sinks", None) is not None:
        return 1
    return getattr(policy, "window", 1)


@pytest.fixture(scope="module")
def engine(tiny: Callable[..., Path], request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A server, whose pool has room to keep prompts that were compacted."""
    policies = SERVERS[request.param]
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_in_process(monkeypatch)
        inside.use_dense_ops(monkeypatch)
        with running(
            tiny(),
            named(policies[0]),
            config=room_for(policies),
            enable_prefix_caching=True,
            max_model_len=640,
        ) as engine:
            inside.poison_free_blocks(engine)
            yield engine


@cases(EACH, FULL, RETAIN[4], SELECT[0])
def test_the_next_turn_reads_the_prompt_of_the_last(
    engine: Engine, tiny: Callable[..., Path], policy: Policy
) -> None:
    """Prompt, answer and question: all but the answer and the question come from the cache."""
    name = named(policy)
    prompt, before = text_of(policy, 3), 0
    for turn in range(3):
        (answer,) = engine.generate([prompt], max_tokens=12, policies=[name])
        (alone,) = cold(engine, [prompt], [name], max_tokens=12)
        assert_close([answer], [alone])
        assert_parity(tiny(), [answer], [policy], most=1)
        if turn:
            # `full` publishes its answers too.
            end = before if policy is not FULL else len(prompt) - 21
            assert answer.cached == floor(end, engine, policy), turn
        before = len(prompt)
        prompt = [*prompt, *answer.tokens, *prompts_of((20,), seed=turn + 50)[0]]
    engine.assert_idle()


@cases(EACH, RETAIN[0], RETAIN[1], SELECT[2], BLOCKS[0])
def test_hits_end_everywhere(engine: Engine, policy: Policy) -> None:
    """In the middle of a block, before and in the window, at the whole prompt and beyond it."""
    name = named(policy)
    text = prompt_of(300, 9 + len(name))
    engine.generate([text], policies=[name])
    lengths = [31, 32, 33, 40, 72, 97, 131, 264, 265, 300]
    prompts = [text[:n] for n in lengths] + [[*text[:n], 5, 4, 3] for n in lengths]
    hits = engine.generate(prompts, policies=[name] * len(prompts))
    assert_close(hits, cold(engine, prompts, [name] * len(prompts)))
    engine.assert_idle()
    own = window(policy)
    ends = [n - own for n in lengths] + [min(n, n + 3 - own) for n in lengths]
    assert [answer.cached for answer in hits] == [floor(n, engine, policy) for n in ends]


@cases(SOME, RETAIN[2], SELECT[0])
def test_chunks_of_one_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    name = named(policy)
    text = text_of(policy, 70)
    engine.generate([text], policies=[name])
    prompts = [text, [*text[:-20], *text[:10]]]
    alone = cold(engine, prompts, [name] * 2)
    monkeypatch.setattr(engine.scheduler.scheduler_config, "long_prefill_token_threshold", 1)
    hits = engine.generate(prompts, policies=[name] * 2)
    ends = (len(text) - window(policy), len(text) - 20)
    assert [answer.cached for answer in hits] == [floor(n, engine, policy) for n in ends]
    assert_close(hits, alone)


@cases(SOME, RETAIN[4], BLOCKS[0])
def test_thrown_out_at_every_step_of_a_hit(engine: Engine, policy: Policy) -> None:
    name = named(policy)
    text = text_of(policy, 90)
    prompts = [text, [*text[:-20], 6, 7]]
    undisturbed = cold(engine, prompts, [name] * 2, max_tokens=6)
    engine.generate([text], policies=[name])
    # They are hits in every round: the pool has room for all.
    hits = engine.generate(prompts, policies=[name] * 2, max_tokens=6)
    assert all(answer.cached for answer in hits)
    assert_close(hits, undisturbed)
    for steps in range(1, 9):
        ids = engine.submit(prompts, 6, [name] * 2)
        engine.step(steps)
        engine.throw_out()
        engine.finish()
        assert [engine.answered[i] for i in ids] == [a.tokens for a in undisturbed], steps
        engine.assert_idle()


@cases(SOME, RETAIN[2], SELECT[0])
def test_several_answers_to_one_prompt(engine: Engine, policy: Policy) -> None:
    """They race for its prefix in one step, and find it in the next turn."""
    name, text = named(policy), text_of(policy, 130)
    how: Any = {"max_tokens": 6, "temperature": 1.0}
    # vLLM gives each answer a seed of its own, from the request's on.
    alone = [cold(engine, [text], [name], seed=seed, **how)[0] for seed in (1, 2, 3)]
    for is_warm in (False, True):
        found = engine.generate([text], policies=[name], n=3, seed=1, **how)
        assert_close(found, alone)
        assert found[0].cached or not is_warm
        engine.assert_idle()


@pytest.mark.parametrize("engine", SERVERS, indirect=True)
def test_all_at_once(engine: Engine, request: pytest.FixtureRequest) -> None:
    """Everybody races for one prefix in one step, the cache empty and then warm."""
    (text,) = prompts_of((230,), seed=200)
    here = [named(p) for p in SERVERS[request.node.callspec.params["engine"]]]
    prompts = [text[: 200 + 3 * i] for i in range(len(here))] + [text] * len(here)
    names = [*here, *here]
    alone = cold(engine, prompts, names)
    for _ in range(2):
        assert_close(engine.generate(prompts, policies=names), alone)
        engine.assert_idle()


@pytest.mark.parametrize("engine", ["retain"], indirect=True)
def test_nobody_to_hand_a_prompt_over_to(engine: Engine) -> None:
    """vLLM passes over such a request's wish where there is no KV connector, and so does a policy:
    what is dropped is freed, and further tokens find their blocks."""
    names, prompts = [NAMES[0], NAMES[1]], prompts_of((200, 97), seed=60)
    alone = cold(engine, prompts, names, max_tokens=40)
    wishes = [{"do_remote_decode": True} for _ in prompts]
    asked = engine.generate(prompts, policies=names, max_tokens=40, transfers=wishes)
    assert_close(asked, alone)
    assert not any(answer.transfer for answer in asked)
    engine.assert_idle()


def test_off(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `kv_share` requests that retain neither read nor publish; `full` ones still do."""
    keep_in_process(monkeypatch)
    (text,) = prompts_of((200,), seed=1)
    with running(
        tiny(), NAMES[0], config={"kv_share": "off"}, enable_prefix_caching=True
    ) as engine:
        names = [None, None, "full", None, "full"]
        cached = [engine.generate([text], policies=[name])[0].cached for name in names]
        counters = engine.stats()["policies"]
        assert [counters[n]["prefix_not_shared"] for n in counters if "snapkv" in n] == [3]
    assert cached == [0, 0, 0, 0, 192]


def test_a_full_pool_keeps_what_it_can(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of one longest prompt: compacted in place, out of the cache; answers stay right."""
    keep_in_process(monkeypatch)
    inside.use_dense_ops(monkeypatch)
    (text,) = prompts_of((300,), seed=4)
    prompts = [text, text[:200], [*text[:250], 1], text, text[:290]]
    names = [named(p) for p in (RETAIN[0], RETAIN[2], FULL, RETAIN[3], RETAIN[0])]
    with running(
        tiny(),
        NAMES[0],
        config={"kv_layout": [named(RETAIN[2]), named(RETAIN[3])]},
        enable_prefix_caching=True,
        max_model_len=320,
        num_gpu_blocks_override=12,
    ) as engine:
        inside.poison_free_blocks(engine)
        alone = cold(engine, prompts, names, max_tokens=8)
        for order in ((0, 1, 2, 3, 4), (4, 2, 0, 1, 3), (2, 2, 0, 0, 4)):
            mixed = engine.generate(
                [prompts[i] for i in order], policies=[names[i] for i in order], max_tokens=8
            )
            assert_close(mixed, [alone[i] for i in order])
            engine.assert_idle()
