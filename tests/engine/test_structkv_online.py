"""StructKV that finds its pivot while a prompt runs, against the dense float32 reference."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reference import structkv
from reference.structkv import WEIGHTS, Struct

from .conftest import EDGES, Answer, prompts_of, running
from .test_structkv_parity import FAST, FULL, Policy, assert_parity, named

LOW, HIGH = 2, 6  # min_layer, max_layer
ONLINE = f"structkv:pivot=online,min_layer={LOW},max_layer={HIGH}"
SOME = Struct(pivot=0)  # Stands for ONLINE: its pivot is the reference's.


def name_of(policy: Policy) -> str:
    return ONLINE if policy is SOME else named(policy)


def pivots_of(model: Path, prompts: Sequence[list[int]], low: int, high: int) -> list[int]:
    """What the reference's rule finds for each prompt alone."""
    loaded = structkv.load(model)
    metrics = [structkv.metrics(loaded, [prompt]) for prompt in prompts]
    return [structkv.online_pivot(each, WEIGHTS, low, high) for each in metrics]


def assert_online_parity(
    model: Path, answers: Sequence[Answer], policies: Sequence[Policy], pivots: Sequence[int]
) -> None:
    found = [
        replace(policy, pivot=pivot) if policy is SOME else policy
        for policy, pivot in zip(policies, pivots, strict=True)
    ]
    assert_parity(model, answers, found)


def counted(stats: dict[str, Any], name: str = ONLINE) -> dict[int, int]:
    pivots = stats["policies"][name]["online_pivots"]
    return {int(layer): count for layer, count in pivots.items()}


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize("budget", [64, 4096])
def test_parity(tiny: Callable[..., Path], budget: int) -> None:
    """Each prompt with its own pivot, in chunks and in one, mixed with other policies."""
    model = tiny()
    lengths = sorted({*EDGES, 41, 60, 63, 64, 65, 72, 100, 127, 128, 129, 136, 200, 333})
    prompts = prompts_of(lengths)
    policies: list[Policy] = [
        (SOME, SOME, FULL, FAST, Struct(3))[i % 5] for i in range(len(prompts))
    ]
    config = {"kv_layout": sorted({name_of(p) for p in policies}), "kv_debug": True}
    with running(
        model, ONLINE, config=config, max_num_seqs=8, max_num_batched_tokens=budget
    ) as engine:
        answers = engine.generate(prompts, policies=[name_of(p) for p in policies], max_tokens=8)
        stats = engine.stats()
        engine.assert_idle()
    pivots = pivots_of(model, prompts, LOW, HIGH)
    # A prompt that propagates every token needs no pivot.
    ours = [
        pivot
        for prompt, policy, pivot in zip(prompts, policies, pivots, strict=True)
        if policy is SOME and max(len(prompt) // 5, SOME.window) < len(prompt)
    ]
    assert len(set(ours)) > 1
    assert counted(stats) == {layer: ours.count(layer) for layer in set(ours)}
    assert_online_parity(model, answers, policies, pivots)


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize("layers", [28, 48, 64])
def test_depths_of_qwen(tiny: Callable[..., Path], layers: int) -> None:
    """The default limits go with the depth, and so does the pivot."""
    model = tiny("qwen2", layers=layers)
    prompts = prompts_of((90, 200, 331))
    low, high = layers // 4, layers // 2
    with running(model, "structkv:pivot=online", max_model_len=512) as engine:
        answers = engine.generate(prompts)
        stats = engine.stats()
        engine.assert_idle()
    pivots = pivots_of(model, prompts, low, high)
    assert all(low <= pivot <= high for pivot in pivots)
    found = counted(stats, "structkv:pivot=online")
    assert found == {pivot: pivots.count(pivot) for pivot in set(pivots)}
    assert_online_parity(model, answers, [SOME] * len(prompts), pivots)


@pytest.mark.usefixtures("dense_ops")
def test_preempted_aborted_and_in_pieces(tiny: Callable[..., Path]) -> None:
    """A pool too small for all, and chunks that spread windows; what is cut off leaves nothing."""
    model = tiny()
    policy = f"{ONLINE},struct_rate=0.9,kv_rate=0.8"
    some = replace(SOME, struct_rate=0.9, kv_rate=0.8)
    prompts = prompts_of((180, 150, 200, 31, 130, 41))
    options = dict(
        num_gpu_blocks_override=24, max_model_len=400, max_num_seqs=6, max_num_batched_tokens=50
    )
    with running(model, policy, config={"kv_debug": True}, **options) as engine:
        answers = engine.generate(prompts, max_tokens=60)
        assert engine.preemptions() > 0, "the pool was meant to be too small"
        engine.assert_idle()
        core = engine.llm.llm_engine
        for steps in range(9):
            ids = engine.submit(prompts_of((180, 90), seed=steps), max_tokens=8)
            for _ in range(steps):
                core.step()
            core.abort_request(ids)
            while core.has_unfinished_requests():
                core.step()
            engine.assert_idle()
            assert engine.scheduler.admission.used_pages == 0
        again = engine.generate(prompts[:2], max_tokens=60)
    pivots = pivots_of(model, prompts, LOW, HIGH)
    policies = [replace(some, pivot=pivot) for pivot in pivots]
    assert_parity(model, [*answers, *again], [*policies, *policies[:2]])
