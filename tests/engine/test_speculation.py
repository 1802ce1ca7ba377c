"""Speculative decoding under policies, against the dense references.

Whatever is drafted, and however much of it is accepted: answers are those of one token after the
other.

The engine's own drafter finds hardly anything to draft in random text, so `Drafter` stands in its
place: it knows the answers, and of each request's drafts any number is right.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from reference import hybrids
from reference.after import After
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.gemfilter import Filter
from reference.knorm import Norm
from reference.pyramidkv import Pyramid
from reference.structkv import Struct
from reference.swiftkv import Swift
from support import inside, options
from support.configs import speculative
from support.cpu_hybrids import complete_cpu_hybrids
from support.drafts import Drafter, some
from support.engine import BLOCK, Answer, Engine, keep_in_process, running
from support.expected import FULL, Online, Policy, Read, Speed, named
from support.nightly import nightly
from support.parity import (
    ask,
    assert_close,
    assert_parity,
    assert_parity_preempted,
    in_turn,
    room_for,
)
from support.prompts import prompts_of

from vllm_kvx.policy.spec import parse_policy

FIER = Retrieve(64)
RETRIEVE: list[Policy] = [Read(FIER), Read(FIER, Keep(kv_rate=0.6)), FULL]
RETAIN: list[Policy] = [FULL, Keep(kv_rate=0.3), Keep(sinks=4, recent=60), Norm(0.4)]
# Of one layout. Stages begin at layers 4 and 6.
PROPAGATE: list[Policy] = [
    Speed(4),
    Speed(6, anchors=3, tail=2),
    Keep(tsp_layer=3, tsp_rate=0.4, kv_rate=0.3),
    Struct(3, 0.4, 0.3),
    Filter(3, rate=0.4, window=8),
    Keep(cutoff=4, kv_rate=0.5),
]
BY_DAY: list[Policy] = [*RETRIEVE, RETAIN[1], PROPAGATE[0], PROPAGATE[2]]
# Answers cross the end of a block, which is that of a group of 32, and some prompts end there. One
# token is left of the first three where all whole blocks are in the cache.
LENGTHS = (97, 161, 65, 150, 193, 90, 31, 128)
TOKENS, DRAFTS = 14, 3


def lengths_of(policies: Sequence[Policy]) -> list[Policy]:
    """A policy for each of `LENGTHS`."""
    return in_turn(policies, len(LENGTHS))


def serve(model: Path, policies: Sequence[Policy], drafts: int, **others: Any) -> Any:
    """An engine with room for the policies; prompts come in beside requests that run."""
    defaults: dict[str, Any] = dict(
        config=room_for(policies),
        enable_prefix_caching=True,
        max_model_len=512,
        max_num_seqs=5,
        speculative_config=speculative(drafts),
    )
    return running(model, "full", **(defaults | others))


def watch_padding(engine: Engine) -> list[int]:
    """Grows by the drafts that vLLM puts behind a prompt's last token, before any is made."""
    schedule, padded = engine.scheduler.schedule, list[int]()

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        drafts = output.scheduled_spec_decode_tokens.values()
        padded.extend(len(tokens) for tokens in drafts if -1 in tokens)
        return output

    engine.scheduler.schedule = watched
    return padded


def answer_in_any_way(
    engine: Engine, model: Path, policies: Sequence[Policy], drafts: int
) -> tuple[Drafter, list[list[int]], list[Answer]]:
    """Answers with wrong drafts alone are the references', and with some right ones the same."""
    prompts, each = prompts_of(LENGTHS, seed=7), lengths_of(policies)
    drafter, padded = Drafter.of(engine, some(3, drafts)), watch_padding(engine)
    one_by_one = ask(engine, prompts, each, max_tokens=TOKENS)
    # One of them may be right by chance.
    assert drafter.accepted[0] > 20 * (drafter.accepted.total() - drafter.accepted[0])
    assert_parity(model, one_by_one, each, most=1)
    drafter.know(one_by_one)
    assert_close(ask(engine, prompts, each, max_tokens=TOKENS), one_by_one)
    assert set(drafter.accepted) == set(range(drafts + 1)), drafter.accepted
    assert padded
    engine.assert_idle()
    return drafter, prompts, one_by_one


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny()


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_in_process(monkeypatch)
        inside.use_dense_ops(monkeypatch)
        with serve(model, BY_DAY, DRAFTS) as engine:
            inside.poison_free_blocks(engine)
            yield engine


@pytest.fixture(scope="module")
def answered(engine: Engine, model: Path) -> tuple[list[list[int]], list[Answer]]:
    """Prompts and what they are answered; half of the drafts to come are right."""
    _, prompts, answers = answer_in_any_way(engine, model, BY_DAY, DRAFTS)
    return prompts, answers


def test_counted_by_policy(engine: Engine, answered: tuple[Any, Any]) -> None:
    """A policy's drafts, and rows that retrieve: each verified token is one."""
    policies = engine.stats()["policies"]
    for policy in BY_DAY:
        counted = policies[str(parse_policy(named(policy)))]
        assert counted["tokens_drafted"] > counted["tokens_accepted"] > 0
        if isinstance(policy, Read):
            rows = counted["retrieval_steps"] + counted["dense_fallbacks"]
            assert rows > counted["tokens_drafted"]
            assert 0 < counted["entries_read"] < counted["entries_held_in_decode"]


def test_preempted_amid_drafts(engine: Engine, answered: tuple[list[Any], list[Answer]]) -> None:
    """Thrown out at any step, requests come back and end as if nothing had been."""
    prompts, answers = answered
    names = [named(policy) for policy in lengths_of(BY_DAY)]
    some_of_them = slice(None) if options.nightly() else slice(0, 4)
    for steps in range(2, 12) if options.nightly() else (5,):
        ids = engine.submit(prompts[some_of_them], TOKENS, names[some_of_them])
        engine.step(steps)
        engine.throw_out()
        engine.finish()
        expected = [answer.tokens for answer in answers[some_of_them]]
        assert [engine.answered[i] for i in ids] == expected, steps
        engine.assert_idle()


def test_aborted_amid_drafts(engine: Engine, answered: tuple[list[Any], list[Answer]]) -> None:
    prompts, answers = answered
    names = [named(policy) for policy in lengths_of(BY_DAY)]
    ids = engine.submit(prompts[:4], TOKENS, names[:4])
    engine.step(4)
    engine.abort(ids[:2])
    assert [engine.answered[i] for i in ids[2:]] == [answer.tokens for answer in answers[2:4]]
    engine.assert_idle()


@nightly
@pytest.mark.parametrize("drafts", [1, 5])
@pytest.mark.parametrize(
    "policies",
    [
        RETAIN,
        [After(Keep(kv_rate=0.3), 4), After(Pyramid(kv_rate=0.3, groups=4), 7), FULL],
        [
            After(Keep(tsp_layer=3, tsp_rate=0.4, kv_rate=0.3), 4),
            After(Keep(kv_rate=0.3), 7, propagates=Struct(3, 0.4, 1)),
            FULL,
        ],
        [
            Read(FIER, After(Keep(kv_rate=0.5), 4)),
            Read(FIER, After(Keep(tsp_layer=3, tsp_rate=0.6, kv_rate=0.5), 7)),
            Read(FIER),
        ],
        RETRIEVE,
        [Read(Retrieve(64, pages=True)), FULL],
        PROPAGATE,
        [Struct(3, 0.4, 0.3, block_size=BLOCK), Swift(4), FULL],
        [Online(2, 4, Struct(0, 0.4, 0.3)), Pyramid(kv_rate=0.3, groups=4)],
        [Read(FIER, Swift(4)), Read(FIER)],
    ],
    ids=lambda policies: named(policies[0]),
)
def test_every_family(model: Path, dense_ops: None, policies: list[Policy], drafts: int) -> None:
    with serve(model, policies, drafts) as engine:
        inside.poison_free_blocks(engine)
        answer_in_any_way(engine, model, policies, drafts)


@nightly
def test_own_drafter(model: Path, dense_ops: None) -> None:
    """The engine's own drafts, in a pool that is too small, and in texts that repeat."""
    options = {"num_gpu_blocks_override": 40, "max_model_len": 288, "max_num_seqs": 6}
    config = speculative(DRAFTS) | {"prompt_lookup_min": 1}
    assert_parity_preempted(model, RETRIEVE, speculative_config=config, **options)
    with serve(model, RETAIN, DRAFTS, speculative_config=config) as engine:
        prompts = [prompt * 2 for prompt in prompts_of((60, 48, 77, 100), seed=2)]
        answers = ask(engine, prompts, RETAIN, max_tokens=60)
        assert_parity(model, answers, RETAIN, most=1)
        counted = engine.stats()["policies"].values()
        assert sum(each["tokens_accepted"] for each in counted) > 0


@nightly
def test_beside_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that slide over a window see what is accepted, whatever was rejected before."""
    complete_cpu_hybrids(monkeypatch)
    model = hybrids.build(tmp_path, "gemma3_text")
    policies = [*RETRIEVE, Keep(kv_rate=0.2), Norm(0.3)]
    with serve(model, policies, DRAFTS) as engine:
        answer_in_any_way(engine, model, policies, DRAFTS)
