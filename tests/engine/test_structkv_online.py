"""StructKV that finds its pivot while a prompt runs, against the dense float32 reference."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from reference.fastkv import Keep
from reference.structkv import Struct
from support import inside
from support.engine import running
from support.expected import FULL, Online, Policy, load, named
from support.nightly import by_day
from support.parity import ask, assert_parity, room_for
from support.prompts import EDGES, prompts_of
from transformers import AutoConfig

from vllm_kvx.policy.spec import parse_policy

LOW, HIGH = 2, 6  # min_layer, max_layer
ONLINE = Online(LOW, HIGH)
OWN = Online(LOW, HIGH, Struct(0, heads="own"))
PAPER = Online(LOW, HIGH, Struct(0, kernel=1, kv_floor=30))
FAST = Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.1)


def pivots_of(model: Path, prompts: Sequence[list[int]], policy: Online) -> list[int]:
    """What the reference's rule finds for each prompt alone."""
    loaded = load(model)
    return [policy.found(loaded, prompt).pivot for prompt in prompts]


def counted(stats: dict[str, Any], policy: Online) -> dict[int, int]:
    """How many prompts found each pivot."""
    pivots = stats["policies"][str(parse_policy(named(policy)))]["online_pivots"]
    return {int(layer): count for layer, count in pivots.items()}


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize(
    ("online", "budget"),
    by_day([(ONLINE, 64), (ONLINE, 4096), (OWN, 64), (PAPER, 96)], {1, 2}),
)
def test_parity(tiny: Callable[..., Path], online: Online, budget: int) -> None:
    """Each prompt with its own pivot, in chunks and in one, mixed with other policies."""
    model = tiny()
    lengths = sorted({*EDGES, 41, 60, 63, 64, 65, 72, 100, 127, 128, 129, 136, 200, 333})
    prompts = prompts_of(lengths)
    policies: list[Policy] = [
        (online, online, FULL, FAST, Struct(3))[i % 5] for i in range(len(prompts))
    ]
    config = room_for(policies)
    with running(
        model, named(online), config=config, max_num_seqs=8, max_num_batched_tokens=budget
    ) as engine:
        answers = ask(engine, prompts, policies, max_tokens=8)
        stats = engine.stats()
        engine.assert_idle()
    pivots = pivots_of(model, prompts, online)
    # A prompt that propagates every token needs no pivot.
    ours = [
        pivot
        for prompt, policy, pivot in zip(prompts, policies, pivots, strict=True)
        if policy is online and online.struct.most(len(prompt)) < len(prompt)
    ]
    assert len(set(ours)) > 1
    assert counted(stats, online) == Counter(ours)
    assert_parity(model, answers, policies)


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize("layers", by_day([28, 48, 64], {0}))
def test_depths_of_qwen(tiny: Callable[..., Path], layers: int) -> None:
    """The default limits go with the depth, and so does the pivot."""
    model = tiny("qwen2", layers=layers)
    prompts = prompts_of((90, 200, 331))
    policy = Online(layers * 2 // 3, layers * 5 // 6)
    with running(model, "structkv:pivot=online,kv_floor=0", max_model_len=512) as engine:
        # vLLM plans with the detector's scratch: its profile runs every layer's hook.
        heads = AutoConfig.from_pretrained(model).num_attention_heads
        assert inside.profiled_scratch(engine) == 8 * heads * 8 * 512 * 4
        answers = engine.generate(prompts)
        stats = engine.stats()
        engine.assert_idle()
    pivots = pivots_of(model, prompts, policy)
    assert all(policy.low <= pivot <= policy.high for pivot in pivots)
    counts = stats["policies"]["structkv:pivot=online,kv_floor=0"]["online_pivots"]
    assert {int(layer): count for layer, count in counts.items()} == Counter(pivots)
    assert_parity(model, answers, policy)


@pytest.mark.usefixtures("dense_ops")
def test_preempted_aborted_and_in_pieces(tiny: Callable[..., Path]) -> None:
    """A pool too small for all, and chunks that spread windows; what is cut off leaves nothing."""
    model = tiny()
    policy = Online(LOW, HIGH, Struct(0, struct_rate=0.9, kv_rate=0.8))
    prompts = prompts_of((180, 150, 200, 31, 130, 41))
    options = dict(
        num_gpu_blocks_override=24, max_model_len=400, max_num_seqs=6, max_num_batched_tokens=50
    )
    with running(model, named(policy), **options) as engine:
        answers = engine.generate(prompts, max_tokens=60)
        assert engine.preemptions() > 0, "the pool was meant to be too small"
        engine.assert_idle()
        for steps in range(9):
            ids = engine.submit(prompts_of((180, 90), seed=steps), max_tokens=8)
            engine.step(steps)
            engine.abort(ids)
            engine.assert_idle()
            assert inside.used_stash_pages(engine) == 0
        again = engine.generate(prompts[:2], max_tokens=60)
    assert_parity(model, [*answers, *again], policy)
