"""SwiftKV without tuned projections against its dense reference, on vLLM's own engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.swiftkv import Swift
from support import inside
from support.engine import running
from support.expected import FULL, Policy, Read, Speed, named
from support.nightly import by_day, nightly
from support.parity import ask, assert_close, assert_parity, room_for
from support.prompts import EDGES, distinct_prompts, prompts_of

SWIFT = Swift(4)
# On one server: two cutoffs, SPEED at each of them and elsewhere, retention, and stock.
MIXED: list[Policy] = [SWIFT, Swift(2), Speed(4), Speed(6, anchors=3, tail=2), Keep(kv_rate=0.2)]
MIXED.append(FULL)


@pytest.mark.parametrize(
    ("arch", "options", "cutoff"),
    by_day(
        [
            ("llama", {}, 4),
            ("llama", {"kv_heads": 4}, 1),
            ("mistral", {}, 7),
            ("qwen2", {}, 4),
            ("qwen3", {"layers": 7}, 3),
        ],
        {4},
    ),
)
def test_chunked_and_mixed_with_full(
    tiny: Callable[..., Path], arch: str, options: dict[str, int], cutoff: int
) -> None:
    """Around blocks and chunks; biases, norms of keys, and stages of unequal size."""
    model = tiny(arch, **options)
    prompts = prompts_of((1, *EDGES, 500, *((1999,) if cutoff == 4 else ())))
    policies = [FULL if i % 3 == 2 else Swift(cutoff) for i in range(len(prompts))]
    with running(model, f"swiftkv-{cutoff}", max_num_seqs=32) as engine:
        answers = ask(engine, prompts, policies)
        engine.assert_idle()
    assert_parity(model, answers, policies)


def test_one_server_in_every_way(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed batches, one token a chunk, preemption, aborts, and prompts that share prefixes."""
    inside.use_dense_ops(monkeypatch)
    model = tiny()
    config = room_for(MIXED)
    with running(
        model, named(SWIFT), config=config, max_num_seqs=16, enable_prefix_caching=True
    ) as engine:
        prompts = distinct_prompts([31 + 29 * i % 170 for i in range(3 * len(MIXED))])
        mixed = MIXED * 3
        together = ask(engine, prompts, mixed)
        alone = [ask(engine, [prompts[i]], [mixed[i]])[0] for i in (0, 1, 6, 7)]
        engine.assert_idle()
        assert_parity(model, together, mixed)
        assert_close(alone, [together[i] for i in (0, 1, 6, 7)])
        swift = [isinstance(mixed[i], Swift) for i in (0, 1, 6, 7)]
        assert not any(a.cached for a, is_swift in zip(alone, swift, strict=True) if is_swift)

        monkeypatch.setattr(engine.scheduler.scheduler_config, "long_prefill_token_threshold", 1)
        prompts = distinct_prompts((33, 1, 21, 2, 27, 9), seed=1)
        answers = ask(engine, prompts, MIXED)
        engine.assert_idle()
        assert_parity(model, answers, MIXED)
        monkeypatch.setattr(engine.scheduler.scheduler_config, "long_prefill_token_threshold", 0)

        prompts = distinct_prompts((150, 97, 201, 120), seed=2)
        swift = [SWIFT, Swift(2)] * 2
        undisturbed = ask(engine, prompts, swift, max_tokens=6)
        assert_parity(model, undisturbed, swift)
        for steps in (1, 3, 5, 7):
            ids = engine.submit(prompts, 6, [named(policy) for policy in swift])
            engine.step(steps)
            engine.throw_out()
            engine.finish()
            assert [engine.answered[i] for i in ids] == [a.tokens for a in undisturbed], steps
            engine.assert_idle()

        for steps in range(0, 8, 2):
            prompts = distinct_prompts((300, 20, 150), seed=steps)
            ids = engine.submit(prompts, 20, [named(policy) for policy in swift[:3]])
            engine.step(steps)
            engine.abort(ids)
            engine.assert_idle()

        # One prompt under all policies in turn: nobody reads entries that are not its own.
        (prompt,) = distinct_prompts((150,), seed=9)
        turns = [SWIFT, FULL, Speed(4), SWIFT, Swift(2), FULL, SWIFT]
        answers = [ask(engine, [prompt], [policy])[0] for policy in turns]
        engine.assert_idle()
        assert_parity(model, answers, turns)
        assert [answer.cached for answer in answers] == [0, 0, 128, 0, 0, 128, 0]


def test_speed_reads_a_prefix_that_it_published(tiny: Callable[..., Path]) -> None:
    """Below the cutoff both compute the same; the anchors are SPEED's own."""
    model = tiny()
    (shared,) = prompts_of((200,))
    prompts = [shared, *(shared + ending for ending in prompts_of((5, 40, 9), seed=1))]
    policies: list[Policy] = [SWIFT, Speed(4), SWIFT, Speed(4)]
    with running(
        model, named(SWIFT), config=room_for(policies), enable_prefix_caching=True
    ) as engine:
        answers = [ask(engine, [a], [b])[0] for a, b in zip(prompts, policies, strict=True)]
        counted = engine.stats()["policies"]
        engine.assert_idle()
    assert_parity(model, answers, policies)
    assert [answer.cached for answer in answers] == [0, 0, 0, 192]
    assert counted[named(SWIFT)]["prefix_not_shared"] == 2


def test_retrieval_reads_what_is_projected(tiny: Callable[..., Path]) -> None:
    """Keys of the upper layers are quantised as any others; alone beside it, and in full."""
    model = tiny()
    read = Read(Retrieve(64), SWIFT)
    policies: list[Policy] = [read, read, Read(Retrieve(64)), SWIFT, FULL]
    prompts = prompts_of([70 + 41 * i % 200 for i in range(15)])
    with running(model, named(read), config=room_for(policies), max_num_seqs=16) as engine:
        answers = ask(engine, prompts, policies * 3, max_tokens=6)
        engine.assert_idle()
    assert_parity(model, answers, policies * 3)


@nightly
def test_preempted_equals_uninterrupted(tiny: Callable[..., Path]) -> None:
    """A pool that is too small: prompts come in anew, and generated tokens after them."""
    model = tiny()
    prompts = prompts_of((180, 150, 200, 170, 90, 129))
    policies = [FULL if i % 3 == 2 else SWIFT for i in range(len(prompts))]
    with running(
        model, "swiftkv-4", num_gpu_blocks_override=40, max_model_len=384, max_num_seqs=4
    ) as engine:
        answers = ask(engine, prompts, policies, max_tokens=70)
        assert any(p.generated for p in engine.preempted), "the pool was meant to be too small"
        engine.assert_idle()
    assert_parity(model, answers, policies)


def test_upper_layers_run_the_last_prompt_token_and_the_answer(tiny: Callable[..., Path]) -> None:
    model = tiny()
    prompts = prompts_of((200, 90))
    with running(model, "swiftkv-4", max_num_batched_tokens=64) as engine:
        rows = inside.watch_rows(engine, cutoff=4)
        answers = engine.generate(prompts, max_tokens=5)
        stats = engine.stats()["policies"]["swiftkv-4"]
    assert_parity(model, answers, SWIFT)
    assert sum(rows[0]) == 290 + 8 and sum(rows[1]) == 2 + 8
    assert stats["layer_tokens_computed"] == 4 * sum(rows[0]) + 4 * sum(rows[1])
    assert stats["layer_tokens_skipped"] == 4 * (290 - 2)
    # Nothing is saved in memory.
    assert stats["blocks_saved"] == 0
