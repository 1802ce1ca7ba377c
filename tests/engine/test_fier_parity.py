"""FIER and Quest against the dense float32 reference, on vLLM's own engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import fastkv, fier
from reference.fier import Retrieve

from vllm_kvx.policy.spec import parse_policy

from .conftest import Answer, assert_matches, prompts_of, running

# Around the edges of groups, blocks, chunks and the budgets of 64, 100 and 128.
LENGTHS = (2, 33, 62, 63, 64, 65, 66, 95, 97, 98, 99, 101, 126, 127, 128, 129, 190, 257, 400)


def named(retrieve: Retrieve) -> str:
    """The policy whose semantics `retrieve` spells out."""
    method, size = ("quest", "page") if retrieve.pages else ("fier", "group")
    return (
        f"{method}-{retrieve.budget}:{size}={retrieve.group},reduction={retrieve.reduction},"
        f"dense_below={retrieve.dense_below}"
    )


def assert_reads(
    model: Any,
    answers: Sequence[Answer],
    retrieve: Retrieve | Sequence[Retrieve],
    keep: Any = fier.FULL,
    least: float = 0.8,
) -> None:
    """Tokens and logprobs equal the reference's, at least as long as its choices are certain.

    retrieve: of all answers, or of each. keep: how prompts are propagated and retained.
    least: share of the tokens that have to be equal for this to show anything.
    """
    loaded = fastkv.load(model)
    compared = 0
    each = [retrieve] * len(answers) if isinstance(retrieve, Retrieve) else retrieve
    for answer, one in zip(answers, each, strict=True):
        expected = fier.score(loaded, answer.prompt, answer.tokens, one, keep)
        errors = (answer.logprobs - expected.chosen_logprob).abs()
        same = [a == b for a, b in zip(expected.argmax, answer.tokens, strict=True)]
        wrong = [i for i, ok in enumerate(same) if not ok or errors[i] >= 1e-4]
        first = wrong[0] if wrong else len(same)
        assert first >= expected.clear_steps, (
            f"prompt of {len(answer.prompt)} tokens, {one}, {keep}: {answer.tokens} for "
            f"{expected.argmax}, logprobs differ by {errors[first]} at {first}"
        )
        compared += first
    total = sum(len(answer.tokens) for answer in answers)
    assert compared >= least * total, f"only {compared} of {total} tokens were compared"


@pytest.mark.parametrize(
    ("arch", "options", "retrieve"),
    [
        ("llama", {}, Retrieve(64)),
        ("mistral", {"kv_heads": 4}, Retrieve(64, reduction="sum")),
        ("qwen2", {"kv_heads": 1}, Retrieve(64, reduction="softmax")),
        ("qwen3", {"head_dim": 64}, Retrieve(64, group=64)),
        ("llama", {"kv_heads": 1, "heads": 8}, Retrieve(64, group=16, pages=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_budgets_in_one_batch(
    tiny: Callable[..., Path], arch: str, options: dict[str, int], retrieve: Retrieve
) -> None:
    """In chunks, with `full` beside them; budgets of whole pages and not, and short contexts."""
    model = tiny(arch, **options)
    widest = replace(retrieve, budget=128)
    policies = [
        retrieve,
        None,
        replace(retrieve, budget=100),
        widest,
        replace(retrieve, dense_below=150),
    ]
    prompts = prompts_of(LENGTHS)
    ours = [policies[i % len(policies)] for i in range(len(prompts))]
    names = ["full" if one is None else named(one) for one in ours]
    options = dict(max_num_seqs=20, max_num_batched_tokens=200)
    with running(model, named(widest), block_size=max(retrieve.group, 32), **options) as engine:
        answers = engine.generate(prompts, max_tokens=5, policies=names)
        engine.assert_idle()
    retrieves = [one for one in ours if one is not None]
    assert_reads(model, [a for a, o in zip(answers, ours, strict=True) if o], retrieves)
    assert_matches(model, [a for a, o in zip(answers, ours, strict=True) if not o], cutoff=None)


def test_one_shot_and_budgets_of_all(tiny: Callable[..., Path]) -> None:
    """Answers that cross groups, in a batch and alone; a budget that all fits into is `full`."""
    model = tiny()
    prompts = prompts_of((60, 63, 64, 90, 96, 127))
    with running(model, "fier-256", max_num_batched_tokens=2304) as engine:
        together = engine.generate(prompts, max_tokens=34, policies=["fier-64"] * len(prompts))
        alone = engine.generate(prompts[3:4], max_tokens=5, policies=["fier-64"])
        both = engine.generate(prompts[:4] * 2, max_tokens=6, policies=[None] * 4 + ["full"] * 4)
        counters = engine.stats()["policies"]["fier-256"]
        engine.assert_idle()
    assert_reads(model, [*together, *alone], Retrieve(64))
    assert_matches(model, both, cutoff=None)
    for ours, theirs in zip(both[:4], both[4:], strict=True):
        assert ours.tokens == theirs.tokens and torch.equal(ours.logprobs, theirs.logprobs)
    assert counters["retrieval_steps"] == counters["entries_scored"] == 0
    assert counters["dense_fallbacks"] == 4 * 5


def test_token_by_token(tiny: Callable[..., Path]) -> None:
    """Chunks of one token look like decode steps, and read everything all the same."""
    model = tiny()
    prompts = prompts_of((70, 61, 66))
    names = ["fier-64", "full", "fier-64"]
    options = dict(long_prefill_token_threshold=1, max_num_batched_tokens=16)
    with running(model, "fier-64", **options) as engine:
        answers = engine.generate(prompts, max_tokens=6, policies=names)
        engine.assert_idle()
    assert_reads(model, answers[::2], Retrieve(64))
    assert_matches(model, answers[1:2], cutoff=None)


def test_by_the_kernels(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs without CUDA ops run, under Triton's interpreter; `auto` never retrieves by it."""
    monkeypatch.setenv("KVX_RETRIEVAL_OPS", "triton")
    model = tiny(layers=3)
    with running(model, named(Retrieve(64))) as engine:
        assert engine.stats()["retrieval"]["ops"] == "triton"
        answers = engine.generate(prompts_of((94,)), max_tokens=4)
        before = engine.stats()["policies"]
        engine.generate(prompts_of((94,)), max_tokens=4, policies=["fier-64"])
        auto = engine.stats()["policies"]["fier-64"]
        engine.assert_idle()
    assert before[str(parse_policy(named(Retrieve(64))))]["retrieval_steps"] == 3
    assert auto["retrieval_steps"] == 0 and auto["dense_fallbacks"] == 3
    assert_reads(model, answers, Retrieve(64))
