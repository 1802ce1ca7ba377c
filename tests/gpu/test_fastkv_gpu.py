"""FastKV and SnapKV compiled, under CUDA graphs, in fp8, over two GPUs. Skipped without a GPU."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import fastkv
from support import inside
from support.engine import Answer, running
from support.gpu import COMPILED, EXACT, NEAR_TIE
from support.models import LOOKUP
from support.parity import assert_parity
from support.prompts import EDGES, lookups, prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

POLICIES: dict[str, fastkv.Keep] = {
    "fastkv:kv_floor=0,tsp_layer=3": fastkv.Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.1),
    "fastkv:tsp_layer=3,tsp_rate=0.7,kv_rate=0.9,kv_floor=0": fastkv.Keep(
        tsp_layer=3, tsp_rate=0.7, kv_rate=0.9
    ),
    "snapkv:kv_budget=40": fastkv.Keep(kv_budget=40),
    "streamingllm:sinks=4,recent=60": fastkv.Keep(sinks=4, recent=60),
    "full": fastkv.Keep(),
}


def test_parity_compiled(tiny: Callable[..., Path]) -> None:
    model = tiny(head_dim=64, hidden=128)
    prompts = prompts_of((*EDGES, 300, 500, 700, 1999, 2000))
    names = [list(POLICIES)[i % len(POLICIES)] for i in range(len(prompts))]
    # Every policy gets the long ones too.
    prompts += prompts_of((1200,) * len(POLICIES), seed=1)
    names += list(POLICIES)
    with running(
        model, names[0], max_num_seqs=32, config={"kv_layout": list(POLICIES)}, **EXACT
    ) as engine:
        counts = inside.count_graph_replays(engine)
        answers = engine.generate(prompts, max_tokens=24, policies=names)
        before = dict(counts)
        decode = engine.generate(prompts_of((40,), seed=4), max_tokens=33)
        # Prompts whose last chunk is one token, which vLLM would run as a decode.
        ones = engine.generate(prompts_of((97, 97, 193), seed=3), max_tokens=4)
        stats = engine.stats()
        engine.assert_idle()
    answers += [*decode, *ones]
    keeps = [POLICIES[name] for name in (*names, *[names[0]] * 4)]
    near = assert_parity(model, answers, keeps, most=2, near_tie=NEAR_TIE)
    full, steps = counts["full"] - before["full"], counts["steps"] - before["steps"]
    assert full >= 32 and full >= steps - 8, (full, steps)
    assert stats["seconds_in_retention"] > 0
    print(json.dumps({"near ties": near, "full replays": full, "steps": steps}))


@pytest.mark.parametrize(
    "policy", ["fastkv:kv_floor=0,tsp_layer=3", "snapkv:kv_rate=0.9,kv_floor=0"]
)
def test_preempted_equals_uninterrupted(tiny: Callable[..., Path], policy: str) -> None:
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
    near = assert_parity(model, answers, keep, most=1, near_tie=NEAR_TIE)
    print(json.dumps({policy: {"preemptions": preemptions, "near ties": near}}))


def test_aborted_prompts_leave_nothing(tiny: Callable[..., Path]) -> None:
    model = tiny(head_dim=64, hidden=128)
    options = EXACT | {"enforce_eager": True, "max_model_len": 768}
    with running(
        model, "fastkv:kv_floor=0,tsp_layer=3", config={"kv_stash_tokens": 768}, **options
    ) as engine:
        for steps in range(12):
            ids = engine.submit(prompts_of((600, 430, 33, 700), seed=steps), max_tokens=8)
            engine.step(steps)
            engine.abort(ids)
            engine.assert_idle()
            assert inside.used_stash_pages(engine) == 0
        # More prompts than the stash holds: they wait for one another.
        answers = engine.generate(prompts_of((600, 40, 131, 700, 650), seed=99), max_tokens=5)
        engine.assert_idle()
        inside.assert_no_prompt(engine)
    assert_parity(
        model, answers, POLICIES["fastkv:kv_floor=0,tsp_layer=3"], most=0, near_tie=NEAR_TIE
    )


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_checkpoint_answers(kv_cache_dtype: str) -> None:
    prompts, expected, decode = lookups(100)
    score = {}
    with running(
        LOOKUP,
        "fastkv:kv_floor=0,tsp_layer=4",
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=64,
        config={"kv_layout": ["streamingllm:recent=1020"]},
        **(COMPILED | {"max_num_batched_tokens": 2048}),
    ) as engine:
        for name in (None, "snapkv:kv_floor=0", "full", "streamingllm:sinks=4,recent=98"):
            answers = engine.generate(prompts, max_tokens=2, policies=[name] * len(prompts))
            right = [decode(a.tokens) == e for a, e in zip(answers, expected, strict=True)]
            score[name or "fastkv:kv_floor=0,tsp_layer=4"] = sum(right) / len(right)
        engine.assert_idle()
    print(json.dumps({"kv_cache_dtype": kv_cache_dtype, "accuracy": score}))
    assert (
        min(score["fastkv:kv_floor=0,tsp_layer=4"], score["snapkv:kv_floor=0"], score["full"])
        >= 0.9
    ), score
    # What is asked for lies anywhere, so position alone must lose.
    assert score["streamingllm:sinks=4,recent=98"] < 0.9, score


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tp2_selects_what_tp1_selects() -> None:
    prompts, _, _ = lookups(24)
    policies = [None, "snapkv:kv_floor=0", "full"] * 8
    answers: dict[int, list[Answer]] = {}
    for size in (1, 2):
        with running(
            LOOKUP, "fastkv:kv_floor=0,tsp_layer=4", tensor_parallel_size=size, **EXACT
        ) as engine:
            answers[size] = engine.generate(prompts, max_tokens=5, policies=policies)
            engine.assert_idle()
    for one, two in zip(answers[1], answers[2], strict=True):
        assert one.tokens == two.tokens
        assert (one.logprobs - two.logprobs).abs().max() < 1e-4
