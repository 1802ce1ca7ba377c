"""Sessions of many turns on a real engine, in a pool too small for them, against cold runs.

`--turns` sets how many turns.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.fastkv import Keep
from reference.structkv import Struct
from support import inside, options
from support.engine import BLOCK, Answer, running
from support.expected import FULL, Policy, named
from support.parity import ATOL, ask, assert_parity, room_for
from support.prompts import prompt_of

TURNS = options.turns(30, at_night=300)
SESSIONS, LONGEST = 20, 480
POLICIES: list[Policy] = [
    Keep(tsp_layer=3, tsp_rate=0.4, kv_rate=0.2),
    Struct(3, struct_rate=0.5, kv_rate=0.3),
    Keep(kv_rate=0.3),
    FULL,
]


def differ(one: Answer, other: Answer) -> bool:
    return one.tokens != other.tokens or bool((one.logprobs - other.logprobs).abs().max() > ATOL)


def test_every_answer_is_a_cold_runs(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sessions at a time ask on; what they hold together is three times the pool."""
    inside.use_dense_ops(monkeypatch)
    rng = random.Random(0)
    said = [prompt_of(rng.randrange(40, 340), seed) for seed in range(SESSIONS)]
    # Two KV groups: fewer blocks than three sessions of ten hold.
    blocks = 2 * sum(-(-len(tokens) // BLOCK) for tokens in said) // 3
    options: dict[str, Any] = dict(config=room_for(POLICIES), enable_prefix_caching=True)
    options |= dict(max_model_len=LONGEST + 32, num_gpu_blocks_override=blocks, max_num_seqs=8)
    policies = [POLICIES[number % len(POLICIES)] for number in range(SESSIONS)]
    answers: list[Answer] = []
    asked: list[Policy] = []
    with running(tiny(), named(POLICIES[0]), **options) as engine:
        inside.poison_free_blocks(engine)
        while len(answers) < TURNS:
            # Every fifth session is quick, and finds more of what it left.
            likely = [number for number in range(SESSIONS) for _ in range(1 if number % 5 else 16)]
            drawn = dict.fromkeys(rng.choices(likely, k=rng.randrange(1, 7)))
            asking = list(drawn)[: TURNS - len(answers)]
            for number in asking:
                if len(said[number]) + 40 > LONGEST:
                    said[number] = []
                said[number] += prompt_of(rng.randrange(8, 40), rng.randrange(1 << 30))
            asked += (under := [policies[number] for number in asking])
            answers += ask(engine, [list(said[number]) for number in asking], under, max_tokens=6)
            engine.assert_idle()
            for number, answer in zip(asking, answers[-len(asking) :], strict=True):
                said[number] += answer.tokens
        preempted, hits = engine.preemptions(), sum(answer.cached > 0 for answer in answers)
        prompts, salts = [a.prompt for a in answers], [str(n) for n in range(len(answers))]
        alone = ask(engine, prompts, asked, max_tokens=6, cache_salt=salts)
        assert not any(answer.cached for answer in alone)
        engine.assert_idle()
    pairs = zip(answers, alone, asked, strict=True)
    odd = [(one, policy) for a, b, policy in pairs if differ(a, b) for one in (a, b)]
    # The reference has to say that it is a choice between near-ties.
    for answer, policy in odd:
        assert_parity(tiny(), [answer], [policy], most=1)
    print({"turns": len(answers), "hits": hits, "preempted": preempted, "near ties": len(odd) // 2})
    assert len(odd) // 2 <= TURNS // 50 and hits > TURNS // 8
