"""`full` on a policy server against stock vLLM, and the KV types a server may ask for."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support import inside
from support.engine import HAS_FP8, running
from support.expected import Speed
from support.nightly import by_day
from support.parity import assert_identical, assert_logprobs, assert_parity
from support.prompts import prompts_of
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

LENGTHS = (2, 33, 97, 200, 64)

OVER_FP8 = pytest.param(
    {"kv_cache_dtype": "fp8"},
    marks=pytest.mark.skipif(not HAS_FP8, reason="this CPU has neither AVX-512 nor AMX"),
)


@pytest.mark.parametrize("options", by_day([{}, {"dtype": "bfloat16"}, OVER_FP8], {0, 2}))
def test_bit_for_bit(tiny: Callable[..., Path], options: dict[str, str]) -> None:
    model = tiny()
    prompts = prompts_of(LENGTHS)
    with running(model, None, **options) as engine:
        stock = engine.generate(prompts, max_tokens=8)
    with running(model, "speed-4", **options) as engine:
        ours = engine.generate(prompts, max_tokens=8, policies=["full"] * len(prompts))
        under_speed = engine.generate(prompts, max_tokens=8)
        alone = [engine.generate([prompt], max_tokens=8)[0] for prompt in prompts[:3]]
        engine.assert_idle()
    assert_identical(ours, stock)
    # The shortest prompt has nothing to drop; the long ones must not be the stock's answers.
    assert under_speed[0].tokens == stock[0].tokens
    assert any(a.tokens != b.tokens for a, b in zip(under_speed, stock, strict=True))
    if options.get("dtype") != "bfloat16":
        assert [a.tokens for a in alone] == [a.tokens for a in under_speed[:3]]


def test_server_of_full_alone_is_stock(tiny: Callable[..., Path]) -> None:
    model = tiny()
    with running(model, "full") as engine:
        answers = engine.generate(prompts_of((33, 97)))
        assert inside.is_stock(engine)
    assert_parity(model, answers, Speed())


def test_seeded_sampling_and_parallel_samples(tiny: Callable[..., Path]) -> None:
    """n > 1 shares the prompt's blocks; each sample keeps its own upper entries."""
    model = tiny()
    (prompt,) = prompts_of((130,))
    with running(model, "speed-4", enable_prefix_caching=True) as engine:
        samples = engine.generate([prompt], max_tokens=6, n=3, temperature=1.0, seed=7)
        greedy = engine.generate([prompt], max_tokens=6, n=1)
        asked = [SamplingParams(n=2), SamplingParams(extra_args={"kv_policy": "full"})]
        inputs = [TokensPrompt(prompt_token_ids=prompt)] * 2
        outputs = engine.llm.generate(inputs, asked, use_tqdm=False)
        engine.assert_idle()
    # What ran is said of each, and the caller's own parameters stay as they are.
    assert [output.kv_policy for output in outputs] == ["speed-4", "full"]
    assert asked[0].extra_args is None
    assert len(samples) == 3
    assert len({tuple(sample.tokens) for sample in samples}) > 1
    assert_logprobs(model, samples, Speed(4))
    assert_parity(model, greedy, Speed(4))
