"""PyramidKV, Knorm, CriticalKV, GemFilter, StructKV with SnapKV's retention, against references.

A method that this version does not have is skipped, and left out of batches.
"""

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.gemfilter import Filter
from reference.knorm import Norm
from reference.pyramidkv import Pyramid
from reference.structkv import Struct
from reference.structsnap import StructSnap
from support import inside
from support.engine import Engine, keep_in_process, running
from support.expected import FULL, ByScore, Policy, is_served, named
from support.nightly import by_day, nightly
from support.parity import ask, assert_close, assert_parity, room_for
from support.prompts import EDGES, distinct_prompts

METHODS: dict[str, list[Policy]] = {
    "pyramidkv": [
        Pyramid(kv_rate=0.3, groups=4),
        Pyramid(kv_budget=40, window=4, kernel=3, beta=5, groups=2),
    ],
    "knorm": [Norm(kv_rate=0.3), Norm(kv_budget=33)],
    "criticalkv": [
        Critical(kv_rate=0.3),
        Critical(kv_budget=33, window=4, kernel=3),
        Critical(kv_rate=0.1, kv_floor=50, kernel=1),
    ],
    "fastkv+criticalkv": [
        Critical(kv_rate=0.2, tsp_layer=3, tsp_rate=0.4),
        Critical(kv_budget=40, tsp_layer=3, tsp_rate=0.3),
    ],
    "score": [
        Struct(3, struct_rate=0.4, kv_rate=0.3, score="critical"),
        ByScore(Critical(kv_rate=0.2, tsp_layer=3, tsp_rate=0.4)),
        Pyramid(kv_rate=0.3, groups=4, score="critical"),
        ByScore(Critical(kv_budget=33, window=4, kernel=3)),
        Struct(5, struct_rate=0.3, kv_rate=0.2, heads="own", score="critical"),
        Struct(1, struct_rate=0.7, kv_budget=40, kernel=1, window=4, score="critical"),
    ],
    "kv_floor": [
        Keep(kv_rate=0.1, kv_floor=60),
        Pyramid(kv_rate=0.1, kv_floor=50, groups=4),
        Keep(sinks=4, kv_rate=0.2, kv_floor=30),
        Keep(tsp_layer=3, tsp_rate=0.2, tsp_floor=60, kv_rate=0.1, kv_floor=40),
        Struct(3, struct_rate=0.2, struct_floor=60, kv_rate=0.1, kv_floor=40),
    ],
    "gemfilter": [
        Filter(3, rate=0.4),
        Filter(3, rate=0.3, window=8, kernel=7),
        Filter(1, rate=0.6, window=4, kernel=1),
        Filter(3, rate=0.1, kv_floor=40),
    ],
    "max": [
        Keep(tsp_layer=3, tsp_rate=0.3, tsp_reduction="max", kv_rate=0.2),
        Struct(3, struct_rate=0.4, struct_reduction="max", kv_rate=0.3),
        Struct(5, struct_rate=0.3, struct_reduction="max", kv_rate=0.2, heads="own"),
        Struct(5, struct_rate=0.3, struct_reduction="max", kv_rate=0.2, kernel=1),
    ],
    "structkv+snapkv": [
        StructSnap(3, struct_rate=0.5, kv_rate=0.2),
        StructSnap(3, struct_rate=0.3, kv_budget=40, kernel=3),
        StructSnap(5, struct_rate=0.6, kv_rate=0.7, window=4, decay=0.6),
    ],
}
SERVED = [policy for policies in METHODS.values() for policy in policies if is_served(policy)]
ONE_OF_EACH = [policies[0] for policies in METHODS.values() if is_served(policies[0])]
BESIDE = [FULL, Keep(kv_rate=0.2), Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=0.2)]


def is_filter(policy: Policy) -> bool:
    """Whether its tokens run again in the place of the prompt, which nobody can share."""
    return isinstance(policy, Filter)


pytestmark = pytest.mark.skipif(not SERVED, reason="none of them is served")
# Floors, and heads' scores by their greatest, are in the other kinds' tests, too.
KINDS = [name for name in METHODS if name not in ("max", "kv_floor")]


def each(*days: str) -> pytest.MarkDecorator:
    """Of all methods, of which others than `days` wait for the night."""
    return pytest.mark.parametrize(
        "policies",
        [
            pytest.param(
                policies,
                id=name,
                marks=[
                    pytest.mark.skipif(not all(map(is_served, policies)), reason="is not served"),
                    *([] if name in days else [nightly]),
                ],
            )
            for name, policies in METHODS.items()
        ],
    )


served = pytest.mark.parametrize(
    "served", by_day([SERVED, ONE_OF_EACH], {1}), ids=["all", "one of each"]
)


@pytest.fixture(scope="class")
def engine(tiny: Callable[..., Path]) -> Iterator[Engine]:
    """One server for all of them, with prefix caching, that scores by torch's references."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_in_process(monkeypatch)
        inside.use_dense_ops(monkeypatch)
        config = room_for([*SERVED, *BESIDE])
        with running(
            tiny(), named(SERVED[0]), config=config, max_num_seqs=16, enable_prefix_caching=True
        ) as engine:
            yield engine


class TestOneServer:
    """Whose engine the tests share."""

    @each(*KINDS)
    def test_lengths_around_every_edge(
        self, engine: Engine, tiny: Callable[..., Path], policies: list[Policy]
    ) -> None:
        """In chunks of 96 tokens, around blocks and windows; then two prompts alone."""
        lengths = (*EDGES, 1, 4, 8, 9, 200, 301, 400)
        prompts = distinct_prompts(lengths)
        mixed = list(islice(cycle(policies), len(prompts)))
        together = ask(engine, prompts, mixed, max_tokens=3)
        picked = [lengths.index(n) for n in (97, 301)]
        alone = [ask(engine, [prompts[i]], [mixed[i]], max_tokens=3)[0] for i in picked]
        engine.assert_idle()
        assert_parity(tiny(), together, mixed)
        assert_close(alone, [together[i] for i in picked])
        # The second time each reads its own prefix; GemFilter's prompts are written over.
        assert (alone[1].cached > 0) != is_filter(mixed[picked[1]])

    @each("score", "gemfilter", "structkv+snapkv")
    def test_chunks_of_one_token(
        self,
        engine: Engine,
        tiny: Callable[..., Path],
        monkeypatch: pytest.MonkeyPatch,
        policies: list[Policy],
    ) -> None:
        """Every window is spread over as many chunks as it has tokens."""
        monkeypatch.setattr(engine.scheduler.scheduler_config, "long_prefill_token_threshold", 1)
        mixed = [*policies, FULL]
        answers = ask(engine, distinct_prompts((40, 21, 33, 9, 27, 36, 31)[: len(mixed)]), mixed)
        engine.assert_idle()
        assert_parity(tiny(), answers, mixed)

    @each("pyramidkv", "knorm", "score")
    def test_thrown_out_at_any_time(
        self, engine: Engine, tiny: Callable[..., Path], policies: list[Policy]
    ) -> None:
        """By hand, after k steps; what comes then is what came without."""
        prompts = distinct_prompts((150, 97, 201, 120, 133, 160)[: len(policies)], seed=1)
        names = [named(policy) for policy in policies]
        undisturbed = ask(engine, prompts, policies, max_tokens=6)
        for steps in (1, 3, 5, 7):
            ids = engine.submit(prompts, 6, names)
            engine.step(steps)
            engine.throw_out()
            engine.finish()
            ours = [engine.answered[i] for i in ids]
            assert ours == [answer.tokens for answer in undisturbed], steps
            engine.assert_idle()
        assert_parity(tiny(), undisturbed, policies)

    @served
    def test_aborted_prompts_leave_nothing(
        self, engine: Engine, tiny: Callable[..., Path], served: list[Policy]
    ) -> None:
        names = [named(policy) for policy in served]
        for steps in range(0, 12, 2):
            prompts = distinct_prompts([60 + 41 * i % 170 for i in range(len(names))], seed=steps)
            ids = engine.submit(prompts, 8, names)
            engine.step(steps)
            engine.abort(ids)
            engine.assert_idle()
        inside.assert_no_centrality(engine)
        prompts = distinct_prompts([80 + 9 * i for i in range(len(names))], seed=99)
        answers = ask(engine, prompts, served)
        engine.assert_idle()
        assert_parity(tiny(), answers, served)

    @served
    def test_full_shares_no_entry_that_was_dropped(
        self, engine: Engine, tiny: Callable[..., Path], served: list[Policy]
    ) -> None:
        """One prompt under all policies in turn, and `full` after each."""
        (prompt,) = distinct_prompts((150,), seed=2)
        policies = [policy for each in served for policy in (each, FULL)]
        answers = [ask(engine, [prompt], [policy])[0] for policy in policies]
        engine.assert_idle()
        assert not any(a.cached for a, p in zip(answers, policies, strict=True) if is_filter(p))
        assert sum(answer.cached > 0 for answer in answers) > len(served)
        assert_parity(tiny(), answers, policies)


@pytest.mark.kernels
@served
def test_mixed_batch_by_the_kernels(tiny: Callable[..., Path], served: list[Policy]) -> None:
    """Side by side with `full`, SnapKV and FastKV, each prompt in one step, by the real kernels."""
    policies = [*served, *BESIDE]
    prompts = distinct_prompts([70 + 37 * i % 90 for i in range(len(policies))], seed=3)
    with running(
        tiny(),
        named(served[0]),
        config=room_for(policies),
        max_num_seqs=16,
        max_num_batched_tokens=2304,
    ) as engine:
        answers = ask(engine, prompts, policies)
        engine.assert_idle()
    assert_parity(tiny(), answers, policies)


@nightly
@pytest.mark.usefixtures("dense_ops")
def test_preempted_equals_uninterrupted(tiny: Callable[..., Path]) -> None:
    """A pool that is too small: prompts come in anew, and generated tokens after them."""
    policies = [*SERVED, FULL, FULL]
    prompts = distinct_prompts([120 + 31 * i % 80 for i in range(len(policies))], seed=4)
    with running(
        tiny(),
        named(SERVED[0]),
        config=room_for(policies),
        # 320 tokens in every layer, however layers are grouped.
        kv_cache_memory_bytes=5 << 18,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=40,
    ) as engine:
        answers = ask(engine, prompts, policies, max_tokens=40)
        assert any(p.generated for p in engine.preempted), "the pool was meant to be too small"
        engine.assert_idle()
    assert_parity(tiny(), answers, policies)


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize(("arch", "kv_heads"), by_day([("qwen2", 1), ("mistral", 4)], {0}))
def test_architectures(tiny: Callable[..., Path], arch: str, kv_heads: int) -> None:
    """The default of eight groups, too, one a layer here."""
    model = tiny(arch, kv_heads=kv_heads)
    policies = [policy for policy in (Pyramid(), *SERVED[::2]) if is_served(policy)]
    prompts = distinct_prompts([90 + 43 * i % 120 for i in range(len(policies))], seed=5)
    with running(model, named(policies[0]), config=room_for(policies)) as engine:
        answers = ask(engine, prompts, policies)
        engine.assert_idle()
    assert_parity(model, answers, policies)
