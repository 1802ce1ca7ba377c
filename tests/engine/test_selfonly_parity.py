"""SelfOnly against its dense reference, on vLLM's own engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
from reference.selfonly import Alone
from reference.swiftkv import Swift
from support import inside
from support.engine import BLOCK, running
from support.expected import FULL, Policy, Speed, named
from support.nightly import by_day, nightly
from support.parity import ask, assert_close, assert_greedy, assert_parity, room_for
from support.prompts import EDGES, prompts_of

ALONE = Alone(4)


@pytest.mark.parametrize(
    ("arch", "options", "cutoff"),
    by_day([("llama", {}, 4), ("qwen2", {"kv_heads": 4}, 6), ("qwen3", {"layers": 7}, 3)], set()),
)
def test_chunked_and_mixed_with_full(
    tiny: Callable[..., Path], arch: str, options: dict[str, int], cutoff: int
) -> None:
    """Around blocks and chunks, and answers that would have filled blocks of the upper layers."""
    model = tiny(arch, **options)
    prompts = prompts_of((1, *EDGES, 500))
    policies = [FULL if i % 3 == 2 else Alone(cutoff, i % 4) for i in range(len(prompts))]
    with running(model, f"selfonly-{cutoff}", config=room_for(policies), max_num_seqs=32) as engine:
        answers = ask(engine, prompts, policies, max_tokens=6)
        long = ask(engine, prompts[:5], policies[:5], max_tokens=40)
        engine.assert_idle()
    assert_parity(model, answers, policies)
    assert_parity(model, long, policies[:5])


def test_one_server_in_every_way(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anchors around blocks, one token a chunk, preemption by hand, and aborts."""
    model = tiny()
    mixed: list[Policy] = [ALONE, Alone(4, 0), Alone(4, 31), Alone(4, 32), Alone(4, 33)]
    mixed += [Alone(2, 3), Speed(4), Swift(4), FULL]
    with running(model, named(ALONE), config=room_for(mixed), max_num_seqs=16) as engine:
        prompts = prompts_of([1 + 29 * i % 170 for i in range(3 * len(mixed))])
        together = ask(engine, prompts, mixed * 3, max_tokens=5)
        alone = [ask(engine, [prompts[i]], [mixed[i]], max_tokens=5)[0] for i in range(5)]
        engine.assert_idle()
        assert_parity(model, together, mixed * 3)
        assert_close(alone, together[:5])

        monkeypatch.setattr(engine.scheduler.scheduler_config, "long_prefill_token_threshold", 1)
        answers = ask(engine, prompts_of((33, 35, 21, 2, 34, 9, 3, 5, 7), seed=1), mixed)
        engine.assert_idle()
        assert_parity(model, answers, mixed)
        monkeypatch.setattr(engine.scheduler.scheduler_config, "long_prefill_token_threshold", 0)

        # Thrown out after some answer: its tokens run again in one chunk with the prompt's end.
        prompts = prompts_of((150, 97, 201, 31), seed=2)
        policies = [ALONE, Alone(4, 0), Alone(4, 33), Alone(2, 3)]
        undisturbed = ask(engine, prompts, policies, max_tokens=9)
        assert_parity(model, undisturbed, policies)
        for steps in (1, 4, 7, 10):
            ids = engine.submit(prompts, 9, [named(policy) for policy in policies])
            engine.step(steps)
            engine.throw_out()
            engine.finish()
            assert [engine.answered[i] for i in ids] == [a.tokens for a in undisturbed], steps
            engine.assert_idle()
        assert any(p.generated > 2 for p in engine.preempted)

        for steps in range(0, 8, 2):
            ids = engine.submit(prompts[:3], 20, [named(policy) for policy in policies[:3]])
            engine.step(steps)
            engine.abort(ids)
            engine.assert_idle()


@nightly
def test_preempted_equals_uninterrupted(tiny: Callable[..., Path]) -> None:
    """Answers longer than a chunk: a chunk may hold generated tokens alone."""
    model = tiny()
    prompts = prompts_of((180, 150, 200, 170, 90, 129))
    policies = [FULL if i % 3 == 2 else ALONE for i in range(len(prompts))]
    with running(
        model,
        "selfonly-4",
        num_gpu_blocks_override=25,
        max_model_len=384,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    ) as engine:
        answers = ask(engine, prompts, policies, max_tokens=100)
        assert any(p.generated > 40 for p in engine.preempted), "the pool was meant to be too small"
        engine.assert_idle()
    assert_parity(model, answers, policies, most=1)


@pytest.mark.parametrize("anchors", by_day([0, 1, 5, 32], {0, 2}))
def test_prefix_hit_equals_cold(tiny: Callable[..., Path], anchors: int) -> None:
    """Anchors come from a block whose other entry changes with every token; SPEED's serve too."""
    model, policy = tiny(), Alone(4, anchors)
    (shared,) = prompts_of((200,))
    prompts = [shared + ending for ending in prompts_of((1, 20, 60), seed=1)] + [shared[:97]]
    speed = Speed(4, anchors)
    mixed: list[Policy] = [policy, speed, policy, speed]
    with running(
        model, named(policy), config=room_for([speed]), enable_prefix_caching=True
    ) as engine:
        ids = engine.submit([shared], 30)
        engine.step(8)
        ids += engine.submit(prompts, 8, [named(other) for other in mixed])
        engine.finish()
        engine.assert_idle()
        again = ask(engine, prompts, mixed)
        engine.assert_idle()
    tokens = [engine.answered[i] for i in ids]
    assert_greedy(model, [shared, *prompts], tokens, [policy, *mixed])
    assert_parity(model, again, mixed)
    assert [answer.cached for answer in again] == [192, 192, 256, 96]


def test_upper_layers_hold_anchors_and_one_entry(tiny: Callable[..., Path]) -> None:
    model = tiny()
    prompts = prompts_of((200, 90))
    with running(model, "selfonly-4:anchors=2", max_num_batched_tokens=64) as engine:
        rows = inside.watch_rows(engine, cutoff=4)
        answers = engine.generate(prompts, max_tokens=5)
        stats = engine.stats()["policies"]["selfonly-4:anchors=2"]
        assert sum(rows[0]) == 290 + 8 and sum(rows[1]) == 2 * (2 + 1) + 8
        # The layer below the cutoff stores the others without running them.
        assert stats["layer_tokens_skipped"] == 5 * (290 - 6)
        ids = engine.submit(prompts[:1], 3 * BLOCK)
        engine.step(2 * BLOCK)
        (request,) = engine.scheduler.requests.values()
        computed, held = request.num_computed_tokens, engine.held_blocks(request.request_id)
        engine.abort(ids)
        engine.assert_idle()
    assert computed > 200 + BLOCK and held == [-(-computed // BLOCK), 1]
    assert_parity(model, answers, Alone(4, 2))
