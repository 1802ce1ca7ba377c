"""Adapters under policies that propagate, against references on merged checkpoints.

Rows leave the batch between layers, so each pass has its own mapping of rows to adapters: those
of a segment, those whose entries in a layer that is split are projected, and chosen ones.
"""

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest
from reference.fastkv import Keep
from reference.gemfilter import Filter
from reference.structkv import Struct
from reference.swiftkv import Swift
from support import options
from support.adapters import Adapters, assert_merged, serving
from support.engine import Engine
from support.expected import FULL, Online, Policy, Speed, named
from support.nightly import by_day, nightly
from support.parity import assert_close
from support.prompts import prompt_of, prompts_of

POLICIES: list[Policy] = [
    Speed(4, anchors=4, tail=2),
    Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=0.2),
    Struct(3, struct_rate=0.4, kv_rate=0.3),
    Filter(3, rate=0.4),
    Keep(cutoff=4, kv_rate=0.4),
    FULL,
]
# With them no layer is split where `speed-4` cuts, or the device finds the pivot.
OTHERS: list[Policy] = [Swift(4), Speed(4), Online(3, 5, Struct(0, struct_rate=0.4)), FULL]
SLOTS, ADAPTERS = 2, 3


@pytest.fixture(scope="module")
def adapters(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tiny(), tmp_path_factory.mktemp("adapters"), ADAPTERS)


@pytest.fixture(scope="module")
def engine(adapters: Adapters) -> Iterator[Engine]:
    yield from serving(adapters, POLICIES, SLOTS)


def assert_in_one_batch(engine: Engine, adapters: Adapters, policies: list[Policy]) -> None:
    times = len(adapters) if options.nightly() else 2
    each_policy = [policy for policy in policies for _ in range(times)]
    each = list(islice(cycle(adapters), len(each_policy)))
    prompts = prompts_of([40 + 13 * i % 210 for i in range(len(each))], seed=5)
    names = [named(policy) for policy in each_policy]
    answers = engine.generate(prompts, 4, names, adapters=each)
    assert not any(answer.cached for answer in answers)
    assert_merged(adapters, answers, each_policy, each)
    again = engine.generate(prompts, 4, names, adapters=each)
    assert sum(answer.cached > 0 for answer in again) > len(again) // 3
    assert_close(again, answers)
    engine.assert_idle()


@nightly
def test_projected_layers_and_pivots_that_are_found(adapters: Adapters) -> None:
    """Policies that project whole layers, and one that reads back its pivot.

    It stands before what needs `engine`: vLLM has one at a time in a process.
    """
    for engine in serving(adapters, OTHERS, SLOTS):
        assert_in_one_batch(engine, adapters, OTHERS)


def test_all_in_one_batch(engine: Engine, adapters: Adapters) -> None:
    """Every policy with every adapter and with none, in chunks; hits answer as cold runs do."""
    assert_in_one_batch(engine, adapters, POLICIES)


@pytest.mark.parametrize("policy", by_day(POLICIES[:3], {0}), ids=named)
def test_no_prefix_crosses_adapters(engine: Engine, adapters: Adapters, policy: Policy) -> None:
    """One prompt under each adapter, then longer ones: each finds what its own adapter left.

    Prefix hits bring entries of SPEED's anchors, and states of tokens that may be selected.
    """
    # States come back in blocks of 256 tokens.
    prompt = prompt_of(400, 40 + len(named(policy)))
    order, name = list(adapters), named(policy)
    first = [engine.generate([prompt], 4, [name], adapters=[adapter])[0] for adapter in order]
    assert [answer.cached for answer in first] == [0] * len(order)
    assert len({tuple(answer.logprobs.tolist()) for answer in first}) == len(order)
    longer = [[*prompt, *range(5, 40 + i)] for i in range(len(order))]
    found = engine.generate(longer, 4, [name] * len(order), adapters=order)
    assert all(answer.cached >= 128 for answer in found)
    assert_merged(adapters, [*first, *found], [policy] * len(order) * 2, order * 2)
    engine.assert_idle()


@nightly
def test_preempted_with_adapters(engine: Engine, adapters: Adapters) -> None:
    """Thrown out at any step, a request comes back with its adapter."""
    policies = [POLICIES[i % 3] for i in range(4)]
    names, each = [named(policy) for policy in policies], list(adapters)
    prompts = prompts_of((150, 97, 170, 64), seed=8)
    undisturbed = engine.generate(prompts, 6, names, adapters=each)
    assert_merged(adapters, undisturbed, policies, each)
    for steps in range(1, 9):
        ids = engine.submit(prompts, 6, names, each)
        engine.step(steps)
        engine.throw_out()
        engine.finish()
        assert [engine.answered[i] for i in ids] == [a.tokens for a in undisturbed], steps
        engine.assert_idle()
