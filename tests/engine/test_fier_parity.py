"""FIER and Quest against the dense float32 reference, on vLLM's own engine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from reference import fastkv, fier

from .conftest import Answer, assert_matches, prompts_of, running

# Around the edges of groups, blocks and the budget of 64.
LENGTHS = (2, 31, 33, 62, 63, 64, 65, 66, 95, 97, 128, 129, 190, 500)


def assert_reads(
    model: Any,
    answers: Sequence[Answer],
    retrieve: fier.Retrieve,
    keep: Any = fier.FULL,
    least: float = 0.8,
) -> None:
    """Tokens and logprobs equal the reference's as long as its choices are certain.

    least: share of the tokens for which they have to be.
    """
    loaded = fastkv.load(model)
    compared = 0
    for answer in answers:
        expected = fier.score(loaded, answer.prompt, answer.tokens, retrieve, keep)
        n = expected.clear_steps
        compared += n
        where = f"prompt of {len(answer.prompt)} tokens, {retrieve}, {keep}"
        assert expected.argmax[:n] == answer.tokens[:n], where
        error = (answer.logprobs - expected.chosen_logprob)[:n].abs().max()
        assert error < 1e-4, f"{where}: logprobs differ by {error}"
    total = sum(len(answer.tokens) for answer in answers)
    assert compared >= least * total, f"only {compared} of {total} tokens follow from clear choices"


@pytest.mark.parametrize(
    ("policy", "retrieve"),
    [
        ("fier-64", fier.Retrieve(64)),
        ("fier-100:reduction=sum", fier.Retrieve(100, reduction="sum")),
        ("fier-64:reduction=softmax", fier.Retrieve(64, reduction="softmax")),
        ("quest-64", fier.Retrieve(64, group=16, pages=True)),
    ],
)
def test_chunked_and_mixed_with_full(
    tiny: Callable[..., Path], policy: str, retrieve: fier.Retrieve
) -> None:
    model = tiny()
    prompts = prompts_of(LENGTHS)
    with running(model, policy, max_num_seqs=32) as engine:
        policies = ["full" if i % 4 == 3 else None for i in range(len(prompts))]
        answers = engine.generate(prompts, max_tokens=6, policies=policies)
        engine.assert_idle()
    assert_reads(model, [a for i, a in enumerate(answers) if i % 4 != 3], retrieve)
    assert_matches(model, [a for i, a in enumerate(answers) if i % 4 == 3], cutoff=None)
