"""What engines answer over quantised weights, beside stock vLLM and beside the dense references."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.swiftkv import Swift

from support.engine import Answer, Engine, forget_ranks, running
from support.expected import FULL, Policy, Read, Speed, expect, named
from support.parity import ask, assert_identical, largest_difference, room_for
from support.prompts import prompts_of
from support.quantized import TIGHT, Quantized

POLICIES: list[Policy] = [
    FULL,
    Keep(kv_rate=0.2),
    Critical(kv_rate=0.2),
    Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=0.2),
    Read(Retrieve(64)),
    Speed(4),
    Swift(2),
]
CHUNK = 96
# What an engine says that has no kernel for a format.
_CANNOT = (ValueError, NotImplementedError, ImportError)


@dataclass(frozen=True)
class Ran:
    """Answers by policy: in whole prompts, and in chunks of mixed batches; and stock vLLM's.

    again: stock vLLM's to the same prompts once more.
    seen: what `look` found.
    """

    stock: list[Answer]
    again: list[Answer]
    whole: dict[str, list[Answer]]
    chunked: dict[str, list[Answer]]
    seen: Any = None


class Off(NamedTuple):
    """How far logprobs are from a reference's: in the median, and nine times in ten."""

    median: float
    most: float


def run_stock(
    quantized: Quantized, lengths: Sequence[int], max_tokens: int, **options: Any
) -> tuple[list[Answer], list[Answer]]:
    """Stock vLLM's answers, twice.

    Skips the test, with vLLM's own words, where it cannot serve these weights.
    """
    prompts, options = prompts_of(lengths), _options(quantized, options)
    try:
        with running(quantized.path, None, **options) as engine:
            first, again = (engine.generate(prompts, max_tokens=max_tokens) for _ in range(2))
            return first, again
    except _CANNOT as error:
        forget_ranks()
        pytest.skip(f"stock vLLM does not serve these weights here: {error}")


def run(
    quantized: Quantized,
    policies: Sequence[Policy],
    lengths: Sequence[int],
    max_tokens: int,
    *,
    look: Callable[[Engine], Any] | None = None,
    **options: Any,
) -> Ran:
    """Stock vLLM's answers, and those of one server with room for `policies`.

    lengths: of the prompts, which together fit a step. look: into the server.
    """
    prompts = prompts_of(lengths)
    stock, again = run_stock(quantized, lengths, max_tokens, **options)
    options = _options(quantized, options)
    with running(quantized.path, "full", config=room_for(policies), **options) as engine:
        seen = None if look is None else look(engine)
        whole = [ask(engine, prompts, [p] * len(prompts), max_tokens=max_tokens) for p in policies]
        engine.assert_idle()
        engine.scheduler.max_num_scheduled_tokens = CHUNK
        steps = engine.watch_running()
        each = [policy for policy in policies for _ in prompts]
        chunked = ask(engine, prompts * len(policies), each, max_tokens=max_tokens)
        engine.assert_idle()
    assert len(steps) >= sum(lengths) * len(policies) // CHUNK
    count = len(prompts)
    parts = [chunked[begin : begin + count] for begin in range(0, len(chunked), count)]
    by_name = (
        {named(policy): part for policy, part in zip(policies, found, strict=True)}
        for found in (whole, parts)
    )
    return Ran(stock, again, *by_name, seen)


def assert_same_bits(ran: Ran) -> None:
    """`full` answers as stock does, bit for bit, unless stock's own kernels do not repeat."""
    if largest_difference(ran.stock, ran.again) == 0:
        assert_identical(ran.whole[named(FULL)], ran.stock)
    else:
        apart = largest_difference(ran.stock, ran.again)
        assert largest_difference(ran.whole[named(FULL)], ran.stock) <= 2 * apart


def _options(quantized: Quantized, options: dict[str, Any]) -> dict[str, Any]:
    sizes = {"max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 2048}
    return quantized.options | sizes | options


def off(model: Any, answers: Sequence[Answer], policy: Policy) -> Off:
    """By how much the logprobs of given tokens differ from the reference's for these tokens."""
    apart = torch.cat(
        [
            (each.logprobs - expect(model, each.prompt, each.tokens, policy).logprobs).abs()
            for each in answers
        ]
    )
    return Off(float(apart.median()), float(apart.quantile(0.9)))


def assert_near(
    quantized: Quantized, answers: dict[str, list[Answer]], policies: Sequence[Policy]
) -> None:
    """Answers are as near to the references of their policies as the format allows.

    They must also be further from what `full` would answer, or nearness would show nothing; but not
    those of retrieval where rounding moves answers as much as it does.
    """
    found = {}
    with quantized.as_served() as model:
        for policy in policies:
            given = answers[named(policy)]
            found[named(policy)] = off(model, given, policy), off(model, given, FULL)
    told = "\n".join(f"{name}: {own}, as full {full}" for name, (own, full) in found.items())
    print(told)
    allowed, is_coarse = Off(*quantized.format.off), quantized.format.off != TIGHT
    for policy in policies:
        own, as_full = found[named(policy)]
        assert own.median <= allowed.median and own.most <= allowed.most, told
        if policy != FULL and not (is_coarse and isinstance(policy, Read)):
            assert own.median <= 0.75 * as_full.median, told


def assert_chunked_near(quantized: Quantized, ran: Ran, policies: Sequence[Policy]) -> None:
    """Answers in chunks of mixed batches are those of whole prompts, or as near to the references.

    Kernels choose their tiles by the number of rows, and may round otherwise.
    """
    allowed = Off(*quantized.format.off)
    with quantized.as_served() as model:
        for policy in policies:
            whole, chunked = ran.whole[named(policy)], ran.chunked[named(policy)]
            apart = largest_difference(whole, chunked)
            if apart == 0 and all(
                a.tokens == b.tokens for a, b in zip(whole, chunked, strict=True)
            ):
                continue
            own = off(model, chunked, policy)
            print(f"{named(policy)} in chunks: {own}, at most {apart} from whole prompts'")
            assert own.median <= allowed.median and own.most <= allowed.most, named(policy)


def assert_dequantised(quantized: Quantized, stock: Sequence[Answer]) -> None:
    """The references have the weights that vLLM has, and not those before they were quantised."""
    with quantized.as_served() as model:
        own = off(model, stock, FULL)
    before = off(quantized.original, stock, FULL)
    print(f"stock: {own}, with the weights as they were: {before}")
    assert own.median <= quantized.format.off[0]
    # Where inputs are rounded, that is most of either difference.
    assert quantized.format.rounds or own.median < 0.5 * before.median
