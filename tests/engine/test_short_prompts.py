"""A short chat has the answer of `full` under defaults: no rate leaves less than a floor."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.engine import running
from support.nightly import by_day
from support.parity import assert_close
from support.prompts import prompts_of

from vllm_kvx.policy.methods.snapkv import DEFAULT_KV_FLOOR

# Every method that keeps or propagates by a rate, with its defaults. The second half keeps by the
# same floors as one of the first.
BARE = (
    (
        *("snapkv:kv_rate=0.1", "knorm:kv_rate=0.1", "streamingllm:kv_rate=0.1"),
        "fastkv:tsp_layer=3",
        *("structkv:pivot=3,granularity=block", "gemfilter:layer=3"),
    ),
    (
        *("criticalkv:kv_rate=0.1", "pyramidkv:groups=4", "structkv:pivot=3"),
        *("structkv:pivot=online,min_layer=2,max_layer=6", "fastkv:tsp_layer=3,kv_budget=512"),
        "fastkv:tsp_layer=3,kv_rate=1+criticalkv:kv_rate=0.1",
    ),
)
SHORT, LONG = (41, DEFAULT_KV_FLOOR), 900


@pytest.mark.parametrize(("bare",), by_day([(names,) for names in BARE], {0}))
def test_short_prompts_are_answered_in_full(
    tiny: Callable[..., Path], bare: tuple[str, ...]
) -> None:
    prompts, (long,) = prompts_of(SHORT), prompts_of((LONG,), seed=1)
    room = {"kv_layout": [*bare, "snapkv:kv_floor=0"]}
    with running(tiny(), "full", config=room, max_num_batched_tokens=512) as engine:
        full = engine.generate([*prompts, long])
        for name in bare:
            answers = engine.generate([*prompts, long], policies=[name] * (len(prompts) + 1))
            assert_close(answers[:-1], full[:-1])
            # A long one is not: what is compared above would show a policy that runs.
            assert (answers[-1].logprobs - full[-1].logprobs).abs().max() > 1e-3, name
        paper = engine.generate(prompts[:1], policies=["snapkv:kv_floor=0"])
        assert (paper[0].logprobs - full[0].logprobs).abs().max() > 1e-3
        engine.assert_idle()
