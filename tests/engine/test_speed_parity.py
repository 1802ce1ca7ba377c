"""SPEED against the dense float32 reference, on vLLM's own engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.engine import running
from support.expected import Speed
from support.nightly import by_day, nightly
from support.parity import assert_parity
from support.prompts import EDGES, prompts_of

LONG = (500, 1999, 2000)


@pytest.mark.parametrize(
    ("arch", "options", "cutoff"),
    [
        pytest.param("llama", {}, 1, marks=nightly),
        ("llama", {}, 4),
        pytest.param("llama", {}, 7, marks=nightly),
        ("llama", {"kv_heads": 4}, 5),
        pytest.param("mistral", {}, 6, marks=nightly),
        pytest.param("mistral", {"kv_heads": 4}, 3, marks=nightly),
        pytest.param("qwen2", {}, 4, marks=nightly),
        ("qwen2", {"kv_heads": 4}, 6),
        pytest.param("qwen3", {}, 5, marks=nightly),
        ("qwen3", {"kv_heads": 4, "layers": 7}, 3),
    ],
)
def test_chunked_and_mixed_with_full(
    tiny: Callable[..., Path], arch: str, options: dict[str, int], cutoff: int
) -> None:
    model = tiny(arch, **options)
    prompts = prompts_of((*EDGES, *(LONG if cutoff == 4 else (500,))))
    with running(model, f"speed-{cutoff}", max_num_seqs=32) as engine:
        policies = ["full" if i % 3 == 2 else None for i in range(len(prompts))]
        answers = engine.generate(prompts, policies=policies)
        engine.assert_idle()
    assert_parity(model, [a for i, a in enumerate(answers) if i % 3 != 2], Speed(cutoff))
    assert_parity(model, [a for i, a in enumerate(answers) if i % 3 == 2], Speed())


@pytest.mark.parametrize("cutoff", by_day([2, 6], {1}))
def test_one_shot(tiny: Callable[..., Path], cutoff: int) -> None:
    model = tiny()
    prompts = prompts_of((2, 33, 200, 1000, 2000))
    with running(model, f"speed-{cutoff}", max_num_batched_tokens=2304) as engine:
        together = engine.generate(prompts)
        alone = [engine.generate([prompt])[0] for prompt in prompts]
        engine.assert_idle()
    assert_parity(model, together, Speed(cutoff))
    assert_parity(model, alone, Speed(cutoff))
    assert [a.tokens for a in together] == [a.tokens for a in alone]


@pytest.mark.parametrize(
    ("anchors", "tail"), by_day([(0, 1), (3, 1), (1, 5), (40, 40), (0, 33), (2, 1000)], {0, 3, 5})
)
def test_anchors_and_tail(tiny: Callable[..., Path], anchors: int, tail: int) -> None:
    model = tiny()
    prompts = prompts_of((2, 5, 34, 64, 80, 81, 97, 300))
    policy = f"speed-4:anchors={anchors},tail={tail}"
    with running(model, policy, max_num_batched_tokens=64) as engine:
        answers = engine.generate(prompts)
        engine.assert_idle()
    assert_parity(model, answers, Speed(4, anchors, tail))


def test_chunks_of_one_token(tiny: Callable[..., Path]) -> None:
    """Every chunk, the last included, is one token: it runs as a decode would."""
    model = tiny()
    prompts = prompts_of((2, 17, 40))
    with running(model, "speed-4", max_num_batched_tokens=8, max_num_seqs=8) as engine:
        threshold = engine.scheduler.scheduler_config
        threshold.long_prefill_token_threshold = 1
        answers = engine.generate(prompts)
        threshold.long_prefill_token_threshold = 0
        # Chunks of 8 that leave one token for the last.
        last = engine.generate(prompts_of((9, 17, 33, 65), seed=1)[-1:])
        engine.assert_idle()
    assert_parity(model, answers, Speed(4))
    assert_parity(model, last, Speed(4))


def test_two_cutoffs_on_one_server(tiny: Callable[..., Path]) -> None:
    """``kv_layout`` makes room for further cutoffs; all of them share one batch."""
    model = tiny()
    prompts = prompts_of((2, 40, 97, 200, 300, 333, 64, 65, 129))
    config = {"kv_layout": ["speed-6", "speed-2"]}
    policies = [None, "speed-6", "speed-2", "full"]
    chosen = [policies[i % 4] for i in range(len(prompts))]
    with running(model, "speed-4", config=config) as engine:
        answers = engine.generate(prompts, policies=chosen)
        engine.assert_idle()
    for name, cutoff in ((None, 4), ("speed-6", 6), ("speed-2", 2), ("full", None)):
        mine = [a for a, p in zip(answers, chosen, strict=True) if p == name]
        assert_parity(model, mine, Speed(cutoff))


@pytest.mark.parametrize(("layers", "cutoff"), by_day([(10, 6), (9, 7), (12, 5)], {1, 2}))
def test_layers_that_do_not_divide(tiny: Callable[..., Path], layers: int, cutoff: int) -> None:
    model = tiny(layers=layers)
    prompts = prompts_of((33, 200, 400))
    with running(model, f"speed-{cutoff}") as engine:
        answers = engine.generate(prompts)
        groups = engine.stats()["layout"]["groups"]
        engine.assert_idle()
    assert_parity(model, answers, Speed(cutoff))
    assert sum(len(group["layers"]) for group in groups) == layers
    assert all((group["segment"] == 1) == (cutoff <= _layer(group)) for group in groups)


def _layer(group: dict) -> int:
    return int(group["layers"][0].split(".")[2])
