"""Whether an engine answers as the dense references do."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from support.engine import Answer, Engine, running
from support.expected import Expected, Policy, Read, expect, load, named
from support.prompts import prompts_of

# Rounding of float32 logprobs by two implementations.
ATOL = 1e-4


def room_for(policies: Sequence[Policy]) -> dict[str, Any]:
    """The configuration of a server that runs all of them."""
    return {"kv_layout": sorted({named(policy) for policy in policies})}


def ask(
    engine: Engine, prompts: Sequence[list[int]], policies: Sequence[Policy], **kw: Any
) -> list[Answer]:
    """Each prompt's answer under its policy, given to the engine at once."""
    return engine.generate(prompts, policies=[named(policy) for policy in policies], **kw)


def in_turn(policies: Sequence[Policy], count: int) -> list[Policy]:
    """The first `count` of the policies, over and over."""
    return [policies[i % len(policies)] for i in range(count)]


def assert_parity_and_again(
    model: Any,
    lengths: Sequence[int],
    policies: Sequence[Policy],
    max_tokens: tuple[int, int] = (6, 4),
) -> None:
    """In chunks beside each other, and again with what their prompts left in the prefix cache.

    lengths: of the prompts, which take the policies in turn. max_tokens: of their answers, and of
    those that come again.
    """
    prompts, each = prompts_of(lengths), in_turn(policies, len(lengths))
    with running(
        model,
        "full",
        config=room_for(policies),
        enable_prefix_caching=True,
        max_model_len=512,
        max_num_seqs=16,
    ) as engine:
        answers = ask(engine, prompts, each, max_tokens=max_tokens[0])
        longer = [[*prompt, 7, 8, 9] for prompt in prompts]
        again = ask(engine, longer, each, max_tokens=max_tokens[1])
        engine.assert_idle()
    assert any(answer.cached for answer in again)
    assert_parity(model, [*answers, *again], each * 2)


def assert_parity_preempted(
    model: Any,
    policies: Sequence[Policy],
    *,
    least: float = 0.8,
    served: Path | None = None,
    **options: Any,
) -> None:
    """A pool that is too small: prompts come in anew, and generated tokens after them.

    least: see `assert_parity`. served: the engine's model where it is not `model`, the references'.
    options: of the engine, its blocks among them.
    """
    prompts = prompts_of((180, 150, 200, 170, 90, 129, 200, 155, 140))
    each = in_turn(policies, len(prompts))
    with running(served or model, "full", config=room_for(policies), **options) as engine:
        answers = ask(engine, prompts, each, max_tokens=70)
        assert engine.preempted, "the pool was meant to be too small"
        engine.assert_idle()
    assert_parity(model, answers, each, most=2, least=least)


def assert_undisturbed(
    engine: Engine,
    prompts: Sequence[list[int]],
    names: Sequence[str],
    answers: Sequence[Answer],
    steps: Iterable[int],
) -> None:
    """Thrown out after so many steps, prompts are answered as ever; aborted, all blocks return.

    answers: undisturbed ones. names: of the prompts' policies.
    """
    tokens = [answer.tokens for answer in answers]
    for count in steps:
        ids = engine.submit(prompts, len(tokens[0]), names)
        engine.step(count)
        engine.throw_out()
        engine.finish()
        assert [engine.answered[i] for i in ids] == tokens, count
        engine.assert_idle()
        ids = engine.submit(prompts, len(tokens[0]), names)
        engine.step(count)
        engine.abort(ids)
        engine.assert_idle()


def assert_parity(
    model: Any,
    answers: Sequence[Answer],
    policies: Policy | Sequence[Policy],
    *,
    most: int | None = None,
    least: float = 0.8,
    near_tie: float | None = None,
    atol: float = ATOL,
) -> int:
    """Greedy tokens equal the references', logprobs within `atol`; near-ties are passed over.

    An answer may differ from the first token on that does not follow from certain choices. How
    many did is returned.

    policies: of all answers, or of each.
    most: how many answers may differ: one in ten unless given, since more would show nothing.
    least: where decode steps retrieve, a choice a token, the share of these answers' tokens that
        must be equal instead.
    near_tie: in place of the references' own, see `Expected`.
    """
    loaded = load(model)
    each = policies if isinstance(policies, Sequence) else repeat(policies, len(answers))
    differed = compared = tokens = kept = 0
    for answer, policy in zip(answers, each, strict=True):
        expected = expect(loaded, answer.prompt, answer.tokens, policy, near_tie)
        first = _assert_clear(answer, expected, atol)
        if isinstance(policy, Read):
            compared, tokens = compared + first, tokens + len(answer.tokens)
        else:
            kept, differed = kept + 1, differed + (first < len(answer.tokens))
    allowed = kept // 10 if most is None else most
    assert differed <= allowed, f"{differed} near-ties among {kept} prompts"
    assert compared >= least * tokens, f"only {compared} of {tokens} tokens were compared"
    return differed


def _assert_clear(answer: Answer, expected: Expected, atol: float) -> int:
    """The first token that differs, or how many there are; it must not be a clear one."""
    errors = (answer.logprobs - expected.logprobs).abs().tolist()
    pairs = zip(expected.argmax, answer.tokens, errors, strict=True)
    right = [theirs == ours and error < atol for theirs, ours, error in pairs]
    first = right.index(False) if False in right else len(right)
    assert first >= expected.clear, (
        f"prompt of {len(answer.prompt)} tokens, {expected.name}, slack {expected.slack}: "
        f"{answer.tokens} for {expected.argmax}, logprobs differ by {errors[first]} at {first}"
    )
    return first


def assert_greedy(
    model: Any,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    policies: Sequence[Policy],
) -> None:
    """Tokens are the references' greedy ones, and no near-tie is passed over."""
    loaded = load(model)
    for prompt, tokens, policy in zip(prompts, answers, policies, strict=True):
        expected = expect(loaded, prompt, tokens, policy)
        assert expected.argmax == tokens, f"prompt of {len(prompt)} tokens, {expected.name}"


def assert_logprobs(model: Any, samples: Sequence[Answer], policy: Policy) -> None:
    """The logprobs of sampled tokens are the reference's."""
    loaded = load(model)
    for sample in samples:
        expected = expect(loaded, sample.prompt, sample.tokens, policy)
        assert (sample.logprobs - expected.logprobs).abs().max() < ATOL


def assert_close(some: Sequence[Answer], others: Sequence[Answer]) -> None:
    """The same tokens, and logprobs that only the order of sums tells apart."""
    for a, b in zip(some, others, strict=True):
        assert a.tokens == b.tokens, len(a.prompt)
        assert torch.allclose(a.logprobs, b.logprobs, atol=2e-5)


def assert_identical(ours: Sequence[Answer], theirs: Sequence[Answer]) -> None:
    """The same bits."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.tokens == b.tokens
        off = (a.logprobs - b.logprobs).abs()
        says = f"prompt of {len(a.prompt)} tokens: logprobs differ by up to {off.max():.3g}: {off}"
        assert torch.equal(a.logprobs, b.logprobs), says


def largest_difference(some: Sequence[Answer], others: Sequence[Answer]) -> float:
    """The largest difference of a logprob up to where an answer differs; inf if one is NaN.

    Two greedy tokens that differ by a near-tie have nearly the same logprob.
    """
    largest = 0.0
    for a, b in zip(some, others, strict=True):
        same = [x == y for x, y in zip(a.tokens, b.tokens, strict=True)]
        first = same.index(False) + 1 if False in same else len(same)
        found = float((a.logprobs - b.logprobs)[:first].abs().max())
        largest = max(largest, found if found == found else float("inf"))
    return largest
