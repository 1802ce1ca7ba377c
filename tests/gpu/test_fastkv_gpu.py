"""FastKV and SnapKV compiled, under CUDA graphs, in fp8, over two GPUs. Skipped without a GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.conftest import (
    EDGES,
    Answer,
    in_process,  # noqa: F401
    prompts_of,
    running,
    tiny,  # noqa: F401
)
from reference import fastkv

from .test_speed_gpu import COMPILED, EXACT, LOOKUP, count_graph_replays

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

POLICIES: dict[str, fastkv.Keep] = {
    "fastkv:tsp_layer=3": fastkv.Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.1),
    "fastkv:tsp_layer=3,tsp_rate=0.7,kv_rate=0.9": fastkv.Keep(
        tsp_layer=3, tsp_rate=0.7, kv_rate=0.9
    ),
    "snapkv:kv_budget=40": fastkv.Keep(kv_budget=40),
    "streamingllm:sinks=4,recent=60": fastkv.Keep(sinks=4, recent=60),
    "full": fastkv.Keep(),
}
# Float32 scores of two implementations agree to about this; a closer choice may fall either way.
NEAR_TIE = 5e-5


def assert_kept(model: Path, answers: list[Answer], keeps: list[fastkv.Keep]) -> int:
    """Tokens and logprobs equal the reference's; how many prompts were too close to call."""
    loaded, near = fastkv.load(model), 0
    for answer, keep in zip(answers, keeps, strict=True):
        expected = fastkv.score(loaded, answer.prompt, answer.tokens, keep)
        error = float((answer.logprobs - expected.chosen_logprob).abs().max())
        if expected.argmax == answer.tokens and error < 1e-4:
            continue
        assert expected.slack < NEAR_TIE, (len(answer.prompt), keep, error, expected.slack)
        near += 1
    return near


def test_parity_compiled(tiny: Callable[..., Path]) -> None:  # noqa: F811
    model = tiny(head_dim=64, hidden=128)
    prompts = prompts_of((*EDGES, 300, 500, 700, 1999, 2000))
    names = [list(POLICIES)[i % len(POLICIES)] for i in range(len(prompts))]
    # Every policy gets the long ones too.
    prompts += prompts_of((1200,) * len(POLICIES), seed=1)
    names += list(POLICIES)
    with running(
        model, names[0], max_num_seqs=32, config={"kv_layout": list(POLICIES)}, **EXACT
    ) as engine:
        counts = count_graph_replays(engine)
        answers = engine.generate(prompts, max_tokens=24, policies=names)
        before = dict(counts)
        decode = engine.generate(prompts_of((40,), seed=4), max_tokens=33)
        # Prompts whose last chunk is one token, which vLLM would run as a decode.
        ones = engine.generate(prompts_of((97, 97, 193), seed=3), max_tokens=4)
        stats = engine.stats()
        engine.assert_idle()
    near = assert_kept(model, answers, [POLICIES[name] for name in names])
    near += assert_kept(model, [*decode, *ones], [POLICIES[names[0]]] * 4)
    assert near <= 2, "too many near-ties to show anything"
    full, steps = counts["full"] - before["full"], counts["steps"] - before["steps"]
    assert full >= 32 and full >= steps - 8, (full, steps)
    assert stats["seconds_in_retention"] > 0
    print(json.dumps({"near ties": near, "full replays": full, "steps": steps}))


@pytest.mark.parametrize("policy", ["fastkv:tsp_layer=3", "snapkv:kv_rate=0.9"])
def test_preempted_equals_uninterrupted(tiny: Callable[..., Path], policy: str) -> None:  # noqa: F811
    model = tiny(head_dim=64, hidden=128)
    keep = POLICIES.get(policy, fastkv.Keep(kv_rate=0.9))
    prompts = prompts_of((180, 150, 200, 170, 90, 129, 160, 31, 330, 300))
    options = EXACT | {"enforce_eager": True}
    with running(
        model, policy, num_gpu_blocks_override=76, max_model_len=576, max_num_seqs=16, **options
    ) as engine:
        answers = engine.generate(prompts, max_tokens=220)
        preemptions = engine.preemptions()
        engine.assert_idle()
    assert preemptions > 0, "the pool was meant to be too small"
    near = assert_kept(model, answers, [keep] * len(prompts))
    print(json.dumps({policy: {"preemptions": preemptions, "near ties": near}}))
    assert near <= 1


def test_aborted_prompts_leave_nothing(tiny: Callable[..., Path]) -> None:  # noqa: F811
    model = tiny(head_dim=64, hidden=128)
    options = EXACT | {"enforce_eager": True, "max_model_len": 768}
    with running(model, "fastkv:tsp_layer=3", config={"kv_stash_tokens": 768}, **options) as engine:
        core = engine.llm.llm_engine
        for steps in range(12):
            ids = engine.submit(prompts_of((600, 430, 33, 700), seed=steps), max_tokens=8)
            for _ in range(steps):
                core.step()
            core.abort_request(ids)
            while core.has_unfinished_requests():
                core.step()
            engine.assert_idle()
            assert engine.scheduler.admission.used_pages == 0
        # More prompts than the stash holds: they wait for one another.
        answers = engine.generate(prompts_of((600, 40, 131, 700, 650), seed=99), max_tokens=5)
        engine.assert_idle()
        state = engine.runner.model_state
        assert not state._prompts and state.stash.used_tokens == 0
    assert assert_kept(model, answers, [POLICIES["fastkv:tsp_layer=3"]] * 5) == 0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_checkpoint_answers(kv_cache_dtype: str) -> None:
    prompts, expected, decode = lookups(100)
    score = {}
    with running(
        LOOKUP,
        "fastkv:tsp_layer=4",
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=64,
        config={"kv_layout": ["streamingllm"]},
        **(COMPILED | {"max_num_batched_tokens": 2048}),
    ) as engine:
        for name in (None, "snapkv", "full", "streamingllm:sinks=4,recent=98"):
            answers = engine.generate(prompts, max_tokens=2, policies=[name] * len(prompts))
            right = [decode(a.tokens) == e for a, e in zip(answers, expected, strict=True)]
            score[name or "fastkv:tsp_layer=4"] = sum(right) / len(right)
        engine.assert_idle()
    print(json.dumps({"kv_cache_dtype": kv_cache_dtype, "accuracy": score}))
    assert min(score["fastkv:tsp_layer=4"], score["snapkv"], score["full"]) >= 0.9, score
    # What is asked for lies anywhere, so position alone must lose.
    assert score["streamingllm:sinks=4,recent=98"] < 0.9, score


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tp2_selects_what_tp1_selects() -> None:
    prompts, _, _ = lookups(24)
    policies = [None, "snapkv", "full"] * 8
    answers: dict[int, list[Answer]] = {}
    for size in (1, 2):
        with running(LOOKUP, "fastkv:tsp_layer=4", tensor_parallel_size=size, **EXACT) as engine:
            answers[size] = engine.generate(prompts, max_tokens=5, policies=policies)
            engine.assert_idle()
    for one, two in zip(answers[1], answers[2], strict=True):
        assert one.tokens == two.tokens
        assert (one.logprobs - two.logprobs).abs().max() < 1e-4


def lookups(count: int, values: int = 1) -> tuple[list[list[int]], list[str], Any]:
    """Prompts of the checkpoint's task, what it should answer, and how to read its tokens.

    values: words of an answer; those after the first one are found by decode steps.
    """
    from transformers import AutoTokenizer

    from benchmarks.checkpoint.prompts import make_prompt

    tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
    questions = [make_prompt(seed, 1024, tokenizer, values) for seed in range(count)]
    prompts = [tokenizer(question).input_ids for question, _ in questions]
    return prompts, [answer for _, answer in questions], tokenizer.decode
