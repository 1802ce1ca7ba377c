"""SPEED compiled, under CUDA graphs, on the engine's default path. Skipped without a GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Answer, running
from support.expected import Speed
from support.gpu import COMPILED, EXACT
from support.inside import count_graph_replays
from support.models import LOOKUP
from support.parity import assert_identical, assert_parity, largest_difference
from support.prompts import EDGES, lookups, prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_parity_compiled(tiny: Callable[..., Path]) -> None:
    model = tiny(head_dim=64, hidden=128)
    prompts = prompts_of((*EDGES, 500, 1999, 2000))
    policies = ["full" if i % 3 == 2 else None for i in range(len(prompts))]
    with running(model, "speed-4", enable_prefix_caching=True, max_num_seqs=32, **EXACT) as engine:
        counts = count_graph_replays(engine)
        answers = engine.generate(prompts, max_tokens=24, policies=policies)
        again = engine.generate([[*p, 7, 8, 9] for p in prompts], max_tokens=4)
        chunks = engine.generate(prompts_of((97, 193), seed=3), max_tokens=4)
        before = dict(counts)
        decode = engine.generate(prompts_of((40,), seed=4), max_tokens=33)
        engine.assert_idle()
    assert_parity(model, [a for a, p in zip(answers, policies, strict=True) if not p], Speed(4))
    assert_parity(model, [a for a, p in zip(answers, policies, strict=True) if p], Speed())
    assert_parity(model, [*again, *chunks, *decode], Speed(4))
    assert any(answer.cached for answer in again)
    steps, full = counts["steps"] - before["steps"], counts["full"] - before["full"]
    # One prefill step; every other one decodes and replays a FULL graph.
    assert full >= 32 and full == steps - 1, (full, steps)


def answers_of(policy: str | None, prompts: list[list[int]], **options: Any) -> list[Answer]:
    """Under `full`, whatever the server's policy; None is stock vLLM."""
    with running(LOOKUP, policy, dtype="bfloat16", **options) as engine:
        names = [None if policy is None else "full"] * len(prompts)
        return engine.generate(prompts, max_tokens=24, policies=names)


def test_full_is_stock_bit_for_bit() -> None:
    """Same kernels, same bits: under CUDA graphs, with vLLM's own kernels."""
    prompts = prompts_of((5, 33, 130, 700, 1500, 17, 64, 250))
    options = COMPILED | {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    stock = answers_of(None, prompts, **options)
    assert_identical(answers_of("speed-4", prompts, **options), stock)


def test_full_is_as_close_to_stock_as_stock_is_to_itself() -> None:
    """Inductor tunes each configuration's kernels by timing, so their sums differ in order.

    Stock vLLM against itself, compiled for a configuration that differs in name only, is the
    measure. Greedy tokens may differ at a near-tie, in few of the answers.
    """
    prompts = prompts_of((5, 33, 130, 700, 1500, 17, 64, 250))
    stock = answers_of(None, prompts, **COMPILED)
    control = answers_of(None, prompts, **COMPILED, config={"named": "otherwise"})
    ours = answers_of("speed-4", prompts, **COMPILED)
    difference = {
        "stock": largest_difference(stock, control),
        "full": largest_difference(stock, ours),
    }
    print(json.dumps({"largest logprob difference to stock": difference}))
    assert difference["full"] <= max(2 * difference["stock"], 0.15)
    parted = sum(a.tokens != b.tokens for a, b in zip(stock, ours, strict=True))
    assert parted <= 3, parted


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_checkpoint_answers(kv_cache_dtype: str) -> None:
    prompts, expected, decode = lookups(100)
    score = {}
    with running(
        LOOKUP,
        "speed-4",
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=64,
        **(COMPILED | {"max_num_batched_tokens": 2048}),
    ) as engine:
        for name in (None, "full"):
            answers = engine.generate(prompts, max_tokens=2, policies=[name] * len(prompts))
            right = [decode(a.tokens) == e for a, e in zip(answers, expected, strict=True)]
            score[name or "speed-4"] = sum(right) / len(right)
        engine.assert_idle()
    print(json.dumps({"kv_cache_dtype": kv_cache_dtype, "accuracy": score}))
    assert min(score.values()) >= 0.95, score


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tp2_gives_the_tokens_of_tp1() -> None:
    prompts, _, _ = lookups(24, values=3)
    policies = [None, "full"] * 12
    answers = {}
    for size in (1, 2):
        with running(
            LOOKUP,
            "speed-4",
            tensor_parallel_size=size,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=1 << 30,  # Evictions would depend on the share of a rank.
            **EXACT,
        ) as engine:
            answers[size] = engine.generate(prompts, max_tokens=5, policies=policies)
            answers[size] += engine.generate([[*p, 9, 8] for p in prompts], max_tokens=5)
            engine.assert_idle()
    for one, two in zip(answers[1], answers[2], strict=True):
        assert one.tokens == two.tokens and one.cached == two.cached
        assert (one.logprobs - two.logprobs).abs().max() < 1e-4
