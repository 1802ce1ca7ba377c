"""Blocks, prefixes and preemption under SPEED, on vLLM's own engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.engine import BLOCK, running
from support.expected import Speed
from support.inside import limit_prefix_hits, watch_rows
from support.nightly import nightly
from support.parity import assert_parity
from support.prompts import prompts_of


def block_bytes(engine_layers: int, kv_heads: int = 2, head_dim: int = 32) -> int:
    """Bytes of one block of one KV group of this many float32 layers."""
    return engine_layers * 2 * BLOCK * kv_heads * head_dim * 4


@pytest.mark.parametrize(
    "policies", [pytest.param([None], marks=nightly), [None, "full"]], ids=["alone", "mixed"]
)
def test_preempted_equals_uninterrupted(tiny: Callable[..., Path], policies: list) -> None:
    model = tiny()
    prompts = prompts_of((180, 150, 200, 170, 90, 129))
    chosen = [policies[i % len(policies)] for i in range(len(prompts))]
    with running(
        model, "speed-4", num_gpu_blocks_override=27, max_model_len=384, max_num_seqs=4
    ) as engine:
        answers = engine.generate(prompts, max_tokens=70, policies=chosen)
        assert engine.preemptions() > 0, "the pool was meant to be too small"
        engine.assert_idle()
    for name, cutoff in ((None, 4), ("full", None)):
        mine = [a for a, p in zip(answers, chosen, strict=True) if p == name]
        assert_parity(model, mine, Speed(cutoff))


def test_prefix_hit_equals_cold(tiny: Callable[..., Path]) -> None:
    model = tiny()
    shared = prompts_of((200,))[0]
    endings = prompts_of((1, 2, 31, 33, 70, 130), seed=1)
    prompts = [shared + ending for ending in endings]
    # Prompts that are prefixes of the shared one: a hit may reach up to their tail.
    prompts += [shared[:n] for n in (33, 64, 65, 96, 97, 128, 129, 160)]
    with running(model, "speed-4", enable_prefix_caching=True) as engine:
        cold = engine.generate([shared])
        assert cold[0].cached == 0
        warm = engine.generate(prompts)
        engine.assert_idle()
        again = engine.generate(prompts[:3])
        limited = []
        if limit_prefix_hits(engine, 2 * BLOCK):
            limited = engine.generate(prompts)
            engine.assert_idle()
    assert_parity(model, [*cold, *warm, *again, *limited], Speed(4))
    for answer in limited:
        # The shorter of vLLM's limit and the policy's.
        assert answer.cached == min(2 * BLOCK, (len(answer.prompt) - 1) // BLOCK * BLOCK)
    for answer in warm:
        common = min(len(answer.prompt) - 1, len(shared))
        assert answer.cached == common // BLOCK * BLOCK, len(answer.prompt)
    assert all(a.cached >= b.cached for a, b in zip(again, warm[:3], strict=True))


@pytest.mark.parametrize(("anchors", "tail"), [(0, 1), (1, 40), (5, 1), (32, 1), (33, 1)])
def test_prefix_hit_with_anchors_and_tail(
    tiny: Callable[..., Path], anchors: int, tail: int
) -> None:
    model = tiny()
    shared = prompts_of((200,))[0]
    prompts = [shared + ending for ending in prompts_of((1, 20, 60), seed=1)] + [shared[:97]]
    policy = f"speed-4:anchors={anchors},tail={tail}"
    with running(model, policy, enable_prefix_caching=True) as engine:
        cold = engine.generate([shared])
        warm = engine.generate(prompts)
        engine.assert_idle()
    assert_parity(model, [*cold, *warm], Speed(4, anchors, tail))
    if anchors <= BLOCK:
        for answer in warm:
            limit = min(len(answer.prompt) - tail, len(shared)) // BLOCK * BLOCK
            assert answer.cached == limit
    else:
        # More anchors than a block holds cannot be handed over: no sharing, and it is counted.
        assert all(answer.cached == 0 for answer in warm)


def test_hits_in_one_step_with_the_request_that_computes_the_prefix(
    tiny: Callable[..., Path],
) -> None:
    """A request scheduled beside the one that computes its anchors must not copy them yet."""
    model = tiny()
    shared = prompts_of((96,))[0]
    prompts = [shared + ending for ending in prompts_of((5, 9, 40, 41), seed=1)]
    with running(
        model, "speed-4", enable_prefix_caching=True, max_num_batched_tokens=2304
    ) as engine:
        answers = engine.generate(prompts)
        engine.assert_idle()
    assert_parity(model, answers, Speed(4))


def test_full_never_reads_a_prefix_without_upper_layers(tiny: Callable[..., Path]) -> None:
    model = tiny()
    shared = prompts_of((200,))[0]
    prompts = [shared + ending for ending in prompts_of((5, 9, 40), seed=1)]
    with running(model, "speed-4", enable_prefix_caching=True) as engine:
        engine.generate([shared])
        full = engine.generate(prompts, policies=["full"] * 3)
        after_full = engine.generate(prompts_of((8,), seed=5) and [prompts[0] + [7, 8, 9]])
        stats = engine.stats()["policies"]
        engine.assert_idle()
    # The others read what the first computed, in all layers.
    assert [answer.cached for answer in full] == [0, 192, 192]
    assert stats["full"]["prefix_not_shared"] == 0 and stats["full"]["prefix_hit"] == 384
    assert_parity(model, full, Speed())
    assert_parity(model, after_full, Speed(4))


@nightly
def test_prefix_survives_preemption_and_eviction(tiny: Callable[..., Path]) -> None:
    """Hits, evictions of anchors and resumed requests in a pool that is too small."""
    model = tiny()
    shared = prompts_of((130,))[0]
    prompts = [shared + ending for ending in prompts_of((5, 9, 40, 41, 60, 33), seed=1)]
    with running(
        model,
        "speed-4",
        enable_prefix_caching=True,
        num_gpu_blocks_override=24,
        max_model_len=320,
        max_num_seqs=4,
    ) as engine:
        first = engine.generate(prompts, max_tokens=60)
        churn = engine.generate(prompts_of((300, 250, 280), seed=9), max_tokens=10)
        second = engine.generate(prompts, max_tokens=20)
        assert engine.preemptions() > 0
        engine.assert_idle()
    assert_parity(model, [*first, *churn, *second], Speed(4))


def test_cache_salt_keeps_prefixes_apart(tiny: Callable[..., Path]) -> None:
    model = tiny()
    prompt = prompts_of((130,))[0]
    with running(model, "speed-4", enable_prefix_caching=True) as engine:
        answers = [engine.generate([prompt], cache_salt=salt)[0] for salt in ("a", "b", "a")]
        engine.assert_idle()
    assert [answer.cached for answer in answers] == [0, 0, 128]
    assert_parity(model, answers, Speed(4))


def test_saved_blocks_serve_other_requests(tiny: Callable[..., Path]) -> None:
    """A pool that stock vLLM fills with two prompts holds four under speed-4 of 8 layers."""
    model = tiny()
    prompts = prompts_of((320, 320, 320))
    # In groups of 4 layers a full prompt takes 2 x 11 blocks, a speed-4 one 11 + 1.
    with running(
        model, "speed-4", num_gpu_blocks_override=38, max_model_len=512, max_num_seqs=8
    ) as engine:
        steps = engine.watch_running()
        answers = engine.generate(prompts, max_tokens=8)
        assert max(steps) == 3 and engine.preemptions() == 0
        full = engine.generate(prompts, max_tokens=8, policies=["full"] * 3)
        engine.assert_idle()
    assert_parity(model, answers, Speed(4))
    assert_parity(model, full, Speed())


def test_abort_at_any_time_returns_every_block(tiny: Callable[..., Path]) -> None:
    model = tiny()
    with running(model, "speed-4", enable_prefix_caching=True) as engine:
        for steps in range(0, 8):
            ids = engine.submit(prompts_of((300, 20, 150), seed=steps), max_tokens=20)
            engine.step(steps)
            engine.abort(ids)
            engine.assert_idle()
        answers = engine.generate(prompts_of((100, 33)))
        engine.assert_idle()
    assert_parity(model, answers, Speed(4))


def test_upper_layers_run_exactly_anchors_tail_and_decode_rows(tiny: Callable[..., Path]) -> None:
    model = tiny()
    prompts = prompts_of((200, 90))
    with running(model, "speed-4:anchors=2,tail=3", max_num_batched_tokens=64) as engine:
        rows = watch_rows(engine, cutoff=4)
        answers = engine.generate(prompts, max_tokens=5)
        stats = engine.stats()["policies"]["speed-4:anchors=2,tail=3"]
    assert_parity(model, answers, Speed(4, 2, 3))
    # Every prompt token once below; above only 2 + 3 of each prompt, and 4 decode tokens each.
    assert sum(rows[0]) == 290 + 8
    assert sum(rows[1]) == 2 * (2 + 3) + 8
    prefill_steps = [upper for lower, upper in zip(*rows, strict=True) if lower > 2]
    assert sum(prefill_steps) <= 2 * 5 + 4, "prefill steps ran more than the kept rows"
    assert stats["prompt_tokens"] == 290
    # The layer below the cutoff runs what those above do.
    assert stats["layer_tokens_computed"] == 3 * sum(rows[0]) + 5 * sum(rows[1])
    assert stats["layer_tokens_skipped"] == 5 * (290 - 10)
