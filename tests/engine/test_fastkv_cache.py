"""Blocks, stash, prefixes, preemption and counters under retention, on vLLM's own engine."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from reference.fastkv import Keep
from support import inside
from support.engine import BLOCK, Engine, running, schedule_ahead
from support.expected import FULL, named
from support.nightly import by_day, nightly
from support.parity import (
    assert_close,
    assert_greedy,
    assert_logprobs,
    assert_parity,
)
from support.prompts import prompts_of

pytestmark = pytest.mark.usefixtures("dense_ops")

FAST = Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.1)
SNAP = Keep(kv_rate=0.1)
STREAM = Keep(sinks=4, recent=20)


def entries(keep: Keep, length: int) -> tuple[list[int], list[int]]:
    """By half of the layers, what a prompt holds while it comes in and what stays of it."""
    most = max(int(length * keep.tsp_rate), keep.window)
    held = [length, min(most, length)]
    if keep.sinks is not None and keep.recent is not None:
        cap = keep.sinks + keep.recent
    elif keep.kv_budget is not None:
        cap = keep.kv_budget
    else:
        assert keep.kv_rate is not None
        cap = max(int(length * keep.kv_rate), keep.window)
    return held, [min(cap, rows) for rows in held]


def blocks(counts: list[int]) -> list[int]:
    return [-(-count // BLOCK) for count in counts]


def internal_id(engine: Engine) -> str:
    """The scheduler's name of the only request there is."""
    (request_id,) = engine.scheduler.requests
    return request_id


def test_blocks_follow_the_formula(tiny: Callable[..., Path]) -> None:
    """While the prompt comes in, from the next schedule on, and while the answer grows."""
    cases = [
        (FAST, 300, 40),
        (replace(FAST, kv_rate=0.32), 300, 40),  # 96 and 60: the upper layers hold fewer.
        (replace(FAST, kv_rate=1.0), 200, 5),
        (replace(FAST, tsp_rate=0.9, kv_rate=0.5), 192, 5),
        (replace(FAST, tsp_rate=0.05, kv_rate=0.05), 100, 30),  # Both are the window.
        (Keep(kv_rate=0.3), 320, 5),  # 96, three blocks to the last entry.
        (Keep(kv_budget=64), 257, 5),
        (STREAM, 193, 5),
        (FAST, 7, 5),
        (FULL, 96, 5),
    ]
    with running(
        tiny(), "fastkv:kv_floor=0,tsp_layer=3", config={"kv_layout": ["streamingllm:recent=1020"]}
    ) as engine:
        usable = engine.pool.num_gpu_blocks - 1
        for keep, length, max_tokens in cases:
            engine.submit(prompts_of((length,)), max_tokens, [named(keep)])
            request_id = internal_id(engine)
            request = engine.scheduler.requests[request_id]
            coming, staying = entries(keep, length)
            while request.num_computed_tokens < length:
                engine.step()
            where = f"{named(keep)}, {length} tokens"
            assert engine.held_blocks(request_id) == blocks(coming), where
            assert engine.pool.get_num_free_blocks() == usable - sum(blocks(coming))
            for generated in range(1, max_tokens - 1):
                engine.step()
                expected = blocks([kept + generated for kept in staying])
                assert engine.held_blocks(request_id) == expected, f"{where} + {generated}"
                assert engine.pool.get_num_free_blocks() == usable - sum(expected)
            engine.finish()
            engine.assert_idle()


def test_freed_blocks_admit_the_next(tiny: Callable[..., Path]) -> None:
    """A second prompt fits only once the first is compacted, and begins right then."""
    model = tiny()
    prompts = prompts_of((320, 320))
    keep = replace(FAST, kv_rate=0.05)
    # Of 22 blocks a prompt takes 10 + 2, then 1 + 1.
    with running(model, named(keep), num_gpu_blocks_override=23, max_model_len=336) as engine:
        running_now = engine.watch_running()
        answers = engine.generate(prompts, max_tokens=12)
        assert engine.preemptions() == 0
        engine.assert_idle()
    # Four chunks of the first, and the second comes in beside its answer.
    assert running_now[:5] == [1, 1, 1, 1, 2], running_now
    assert_parity(model, answers, [keep] * 2)


def test_preempted_in_decode_equals_uninterrupted(tiny: Callable[..., Path]) -> None:
    model = tiny()
    mixed = [replace(FAST, tsp_rate=0.9, kv_rate=0.7), FULL, Keep(kv_rate=0.8), STREAM]
    keeps = [mixed[i % 4] for i in range(6)]
    prompts = prompts_of((180, 90, 150, 200, 130, 60))
    with running(
        model,
        "fastkv:kv_floor=0,tsp_layer=3",
        config={"kv_layout": ["streamingllm:recent=1020"]},
        num_gpu_blocks_override=27,
        max_model_len=384,
        max_num_seqs=4,
    ) as engine:
        answers = engine.generate(prompts, max_tokens=60, policies=[named(k) for k in keeps])
        assert any(p.computed > p.prompt_len for p in engine.preempted)
        engine.assert_idle()
    assert_parity(model, answers, keeps)


@nightly
def test_preempted_in_prefill_equals_uninterrupted(tiny: Callable[..., Path]) -> None:
    """Short chunks: running answers take the blocks that an admitted prompt still needs."""
    model = tiny()
    keep = replace(FAST, tsp_rate=0.9, kv_rate=0.7)
    keeps = [FULL, FULL, keep, Keep(kv_rate=0.5), keep]
    prompts = prompts_of((60, 61, 150, 170, 130))
    with running(
        model,
        "fastkv:kv_floor=0,tsp_layer=3",
        num_gpu_blocks_override=22,
        max_model_len=320,
        max_num_seqs=4,
        max_num_batched_tokens=11,
    ) as engine:
        answers = engine.generate(prompts, max_tokens=70, policies=[named(k) for k in keeps])
        assert any(0 < p.computed < p.prompt_len for p in engine.preempted)
        engine.assert_idle()
    assert_parity(model, answers, keeps)


def test_preempted_at_any_time(tiny: Callable[..., Path]) -> None:
    """Thrown out by hand after k steps, window in parts included; generated tokens all stay."""
    model = tiny()
    keep = Keep(tsp_layer=3, tsp_rate=0.5, kv_rate=0.3)
    prompts = prompts_of((70, 41))
    with running(model, named(keep), max_num_batched_tokens=20) as engine:
        undisturbed = engine.generate(prompts, max_tokens=8)
        for steps in range(1, 13):
            ids = engine.submit(prompts, max_tokens=8)
            engine.step(steps)
            engine.throw_out()
            engine.finish()
            assert [engine.answered[i] for i in ids] == [a.tokens for a in undisturbed], steps
            engine.assert_idle()
    assert_parity(model, undisturbed, [keep] * 2)


@pytest.mark.parametrize("policy", by_day([named(FAST), "snapkv:kv_floor=0"], {0}))
def test_abort_at_any_time_returns_everything(tiny: Callable[..., Path], policy: str) -> None:
    model = tiny()
    with running(
        model, policy, enable_prefix_caching=True, max_num_batched_tokens=64, max_num_seqs=3
    ) as engine:
        for steps in range(0, 13):
            # The fourth waits, with the stash's pages or without.
            prompts = prompts_of((150, 20, 201, 90), seed=steps)
            ids = engine.submit(prompts, max_tokens=4)
            engine.step(steps)
            engine.abort(ids)
            engine.assert_idle()
        prompts = prompts_of((100, 33))
        answers = engine.generate(prompts)
        engine.assert_idle()
    assert_parity(model, answers, [FAST if "fast" in policy else SNAP] * 2)


@contextmanager
def log_lines(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a logger says at level INFO meanwhile."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger(name), Collect()
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def test_prompts_wait_for_the_stash(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stash of one longest prompt: others wait in turn, and say so once."""
    model = tiny()
    lengths = (300, 310, 40, 290, 30, 320)
    prompts = prompts_of(lengths)
    keeps = [FAST, FAST, FULL, replace(FAST, tsp_rate=0.9), FAST, FAST]
    with (
        running(
            model,
            "fastkv:kv_floor=0,tsp_layer=3",
            config={"kv_stash_tokens": 384},
            max_model_len=384,
        ) as engine,
        log_lines("vllm.kvx.scheduler", monkeypatch) as lines,
    ):
        used = inside.watch_stash(engine)
        ids = engine.submit(prompts, 4, [named(k) for k in keeps])
        engine.finish(max_steps=60)
        engine.assert_idle()
        assert engine.preemptions() == 0
    assert_greedy(model, prompts, [engine.answered[i] for i in ids], keeps)
    assert max(used) == 6 and used[-1] == 0, used
    waits = [line for line in lines if "waits" in line]
    # 300 takes 5 pages of 64 out of 6, so every long prompt waits for the one before. The page that
    # is left is not for the short one: it would overtake.
    assert len(waits) == 4 and len(set(waits)) == 4, lines
    for length in (310, 290, 30, 320):
        assert sum(f"of {length} tokens waits" in line for line in waits) == 1


def test_waiting_prompt_must_not_keep_the_stash_from_a_preempted_one(
    tiny: Callable[..., Path],
) -> None:
    """The second long prompt finds no blocks; the first is preempted and stands before it.

    With pages of the stash in a waiting prompt's hands neither could ever run.
    """
    model = tiny()
    keep = replace(FAST, tsp_rate=0.9, kv_rate=0.9)
    keeps = [FULL, keep, keep]
    prompts = prompts_of((100, 300, 301))
    with running(
        model,
        "fastkv:kv_floor=0,tsp_layer=3",
        config={"kv_stash_tokens": 384},
        max_model_len=384,
        num_gpu_blocks_override=31,
    ) as engine:
        ids = engine.submit(prompts[:2], 90, [named(k) for k in keeps[:2]])
        # The long one is in, and gave its stash back; the next finds no blocks.
        engine.step(6)
        ids += engine.submit(prompts[2:], 5, [named(keep)])
        engine.finish(max_steps=200)
        assert engine.preemptions() > 0
        engine.assert_idle()
    assert_greedy(model, prompts, [engine.answered[i] for i in ids], keeps)


def test_everybody_shares_prefixes(tiny: Callable[..., Path]) -> None:
    """By what each has of them in common: states, all layers, or nothing yet."""
    model = tiny()
    shared, other = prompts_of((330, 280))
    prompts = [shared, [*shared, 7, 8, 9], shared, other]
    with running(model, "fastkv:kv_floor=0,tsp_layer=3", enable_prefix_caching=True) as engine:
        answers = engine.generate(prompts)
        again = engine.generate(prompts)
        retained = engine.generate(prompts, policies=["snapkv:kv_floor=0"] * 4)
        full = engine.generate(prompts, policies=["full"] * 4)
        stats = engine.stats()["policies"]
        assert inside.state_tokens(engine) == 256
        engine.assert_idle()
    assert [a.cached for a in again] == [256] * 4
    # The upper layers come with `snapkv`; given at once, all but the first find most of it.
    assert retained[0].cached == retained[3].cached == 0
    assert [a.cached for a in full] == [320, 320, 320, 256]
    assert_close(answers, again)
    assert_parity(model, [*answers, *retained, *full], [FAST] * 4 + [SNAP] * 4 + [FULL] * 4)
    assert not any(counters["prefix_not_shared"] for counters in stats.values())
    assert stats["fastkv:kv_floor=0,tsp_layer=3"]["prefix_states"] >= 512


def test_one_token_and_two_samples(tiny: Callable[..., Path]) -> None:
    """Requests that end with their prompt; n samples of one prompt keep entries of their own."""
    model = tiny()
    prompts = prompts_of((200, 9, 97, 150))
    keeps = [FAST, FAST, SNAP, STREAM]
    with running(
        model, "fastkv:kv_floor=0,tsp_layer=3", config={"kv_layout": ["streamingllm:recent=1020"]}
    ) as engine:
        ones = engine.generate(prompts, max_tokens=1, policies=[named(k) for k in keeps])
        engine.assert_idle()
        first, second = (
            engine.generate(prompts[:1], max_tokens=6, n=2, temperature=1.0, seed=7)
            for _ in range(2)
        )
        engine.assert_idle()
    assert_parity(model, ones, keeps)
    assert first[0].tokens != first[1].tokens
    assert [a.tokens for a in first] == [a.tokens for a in second]
    assert_logprobs(model, first, FAST)


def test_counters(tiny: Callable[..., Path]) -> None:
    """What 8 layers in two groups of 4 propagated, kept, dropped and freed."""
    model = tiny()
    names = [
        "fastkv:kv_floor=0,tsp_layer=3",
        "snapkv:kv_rate=0.25,kv_floor=0",
        "streamingllm:recent=20",
        "full",
    ]
    with running(model, names[0], config={"kv_layout": names}) as engine:
        for name in names:
            engine.generate(prompts_of((200, 7)), max_tokens=5, policies=[name] * 2)
        stats = engine.stats()["policies"]
        engine.assert_idle()
    fast, snap, stream, full = (stats[name] for name in names)
    for counters in (fast, snap, stream, full):
        assert counters["requests"] == 2 and counters["prompt_tokens"] == 207
    # 200 tokens of which 40 go on; 20 entries stay per layer of 200 below and 40 above.
    assert fast["tokens_propagated"] == 40
    assert fast["entries_retained"] == 8 * 20
    assert fast["entries_retained_by_layer"] == [20] * 8
    assert fast["entries_dropped"] == 4 * 180 + 4 * 20
    assert fast["blocks_freed"] == (7 - 1) + (2 - 1)
    # The layer that selects runs the 40.
    assert fast["layer_tokens_skipped"] == 5 * 160
    assert fast["layer_tokens_computed"] == 3 * 200 + 5 * 40 + 8 * (7 + 2 * 4)
    # 50 of 200 stay everywhere.
    assert snap["tokens_propagated"] == 0
    assert snap["entries_retained_by_layer"] == [50] * 8
    assert (snap["entries_retained"], snap["entries_dropped"]) == (8 * 50, 8 * 150)
    assert snap["blocks_freed"] == 2 * (7 - 2)
    assert stream["entries_retained_by_layer"] == [24] * 8
    assert (stream["entries_retained"], stream["entries_dropped"]) == (8 * 24, 8 * 176)
    assert stream["blocks_freed"] == 2 * (7 - 1)
    for counters in (snap, stream, full):
        assert counters["layer_tokens_skipped"] == 0
        assert counters["layer_tokens_computed"] == 8 * (207 + 2 * 4)
    assert full["blocks_freed"] == full["entries_dropped"] == 0


@pytest.mark.parametrize("is_async", by_day([True, False], {0}))
def test_asynchronous_scheduling(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Steps are planned before the one before them is done."""
    schedule_ahead(monkeypatch, is_async)
    model = tiny()
    mixed = [replace(FAST, tsp_rate=0.9, kv_rate=0.7), FULL, Keep(kv_rate=0.8), STREAM, FAST]
    keeps = [mixed[i % 5] for i in range(6)]
    prompts = prompts_of((180, 90, 150, 200, 130, 60))
    with running(
        model,
        "fastkv:kv_floor=0,tsp_layer=3",
        config={"kv_layout": ["streamingllm:recent=1020"], "kv_stash_tokens": 384},
        async_scheduling=is_async,
        num_gpu_blocks_override=27,
        max_model_len=384,
        max_num_seqs=4,
    ) as engine:
        assert ("Async" in type(engine.scheduler).__name__) == is_async
        answers = engine.generate(prompts, max_tokens=40, policies=[named(k) for k in keeps])
        assert engine.preemptions() > 0
        engine.assert_idle()
        ones = engine.generate(prompts, max_tokens=1, policies=[named(k) for k in keeps])
        engine.assert_idle()
        for steps in range(1, 9, 2):
            ids = engine.submit(prompts[:3], 5, [named(k) for k in keeps[:3]])
            engine.step(steps)
            engine.abort(ids)
            engine.assert_idle()
        last = engine.generate(prompts[:2], policies=[named(k) for k in keeps[:2]])
        engine.assert_idle()
    assert_parity(model, [*answers, *ones, *last], [*keeps, *keeps, *keeps[:2]])
