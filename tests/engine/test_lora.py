"""Adapters under policies that retain or retrieve, against references on merged checkpoints.

Every batch mixes adapters, requests without one, and policies. There are more adapters than slots
for their weights, so some requests wait, and weights are loaded while others run.
"""

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.knorm import Norm
from reference.pyramidkv import Pyramid
from support import options
from support.adapters import Adapters, assert_merged, serving
from support.engine import Engine, keep_in_process, running, schedule_ahead
from support.expected import FULL, Policy, Read, named
from support.nightly import by_day, nightly
from support.parity import assert_close
from support.prompts import prompt_of, prompts_of

POLICIES: list[Policy] = [
    FULL,
    Keep(kv_rate=0.3),
    Read(Retrieve(64, dense_below=0)),
    Keep(sinks=4, recent=60),
    Norm(kv_rate=0.4),
    Pyramid(kv_rate=0.3, groups=4),
    Read(Retrieve(64, dense_below=0), Keep(kv_rate=0.6)),
]
SLOTS, ADAPTERS = 2, 3


@pytest.fixture(scope="module")
def adapters(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tiny(), tmp_path_factory.mktemp("adapters"), ADAPTERS)


@pytest.fixture(scope="module")
def engine(adapters: Adapters) -> Iterator[Engine]:
    yield from serving(adapters, POLICIES, SLOTS)


def test_all_in_one_batch(engine: Engine, adapters: Adapters) -> None:
    """Every policy with every adapter and with none, in chunks; hits answer as cold runs do."""
    policies = [policy for policy in POLICIES for _ in adapters]
    each = list(islice(cycle(adapters), len(policies)))
    prompts = prompts_of([40 + 13 * i % 210 for i in range(len(policies))], seed=5)
    names = [named(policy) for policy in policies]
    answers = engine.generate(prompts, 6, names, adapters=each)
    assert not any(answer.cached for answer in answers)
    assert_merged(adapters, answers, policies, each)
    again = engine.generate(prompts, 6, names, adapters=each)
    assert sum(answer.cached > 0 for answer in again) > len(again) // 2
    assert_close(again, answers)
    engine.assert_idle()


@pytest.mark.parametrize("policy", by_day(POLICIES[:3], {1}), ids=named)
def test_no_prefix_crosses_adapters(engine: Engine, adapters: Adapters, policy: Policy) -> None:
    """One prompt under each adapter: each finds its own blocks alone, whoever came before."""
    prompt = prompt_of(200, 40 + len(named(policy)))
    order = list(adapters)
    first = [
        engine.generate([prompt], 6, [named(policy)], adapters=[adapter])[0] for adapter in order
    ]
    assert [answer.cached for answer in first] == [0] * len(order)
    assert len({tuple(answer.logprobs.tolist()) for answer in first}) == len(order)
    assert_merged(adapters, first, [policy] * len(order), order)
    # Another policy reads what they left, at once.
    other = FULL if policy != FULL else POLICIES[1]
    found = engine.generate([prompt] * len(order), 6, [named(other)] * len(order), adapters=order)
    assert [answer.cached for answer in found] == [192] * len(order)
    assert_merged(adapters, found, [other] * len(order), order)
    engine.assert_idle()


@nightly
def test_preempted_with_adapters(engine: Engine, adapters: Adapters) -> None:
    """Thrown out at any step, a request comes back with its adapter."""
    policies = [POLICIES[i % 3] for i in range(4)]
    names, each = [named(policy) for policy in policies], list(adapters)
    prompts = prompts_of((150, 97, 170, 64), seed=8)
    undisturbed = engine.generate(prompts, 6, names, adapters=each)
    assert_merged(adapters, undisturbed, policies, each)
    for steps in range(1, 9) if options.nightly() else (2, 4, 7):
        ids = engine.submit(prompts, 6, names, each)
        engine.step(steps)
        engine.throw_out()
        engine.finish()
        assert [engine.answered[i] for i in ids] == [a.tokens for a in undisturbed], steps
        engine.assert_idle()


@pytest.mark.parametrize(("max_tokens", "longest"), [(8, 640), (50, 104)])
def test_begins_when_vllm_does(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch, max_tokens: int, longest: int
) -> None:
    """Steps planned ahead give a slot away once its adapter's last token is under way."""
    keep_in_process(monkeypatch)
    schedule_ahead(monkeypatch, True)
    prompts = prompts_of((97, 33, 90, 5, 64, 100), seed=1)
    each = list(islice(cycle([*adapters][1:]), len(prompts)))
    room = dict(enable_lora=True, max_loras=SLOTS, max_lora_rank=8, max_model_len=longest)

    def steps(policy: str | None) -> list[dict[int, int]]:
        with running(adapters[None], policy, **room) as engine:
            found = engine.watch_steps()
            names = [None if policy is None else "full"] * len(prompts)
            engine.generate(prompts, max_tokens, names, adapters=each)
        return [step for step in found if step]

    assert steps("snapkv:kv_rate=0.3") == steps(None)
