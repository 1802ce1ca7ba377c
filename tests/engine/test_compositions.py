"""Propagation by one method with retention by another, against dense references."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import fastkv, gemfilter, knorm, structsnap
from reference.fastkv import Keep, KeptResult
from reference.gemfilter import Filter
from reference.knorm import Norm
from reference.pyramidkv import Pyramid
from reference.structsnap import StructSnap
from support import inside
from support.engine import running
from support.nightly import nightly
from support.parity import ATOL
from support.prompts import distinct_prompts
from torch import Tensor

Retain = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, float]]
LAYERS = 8


def by_norm(rate: float) -> Retain:
    return lambda probs, keys, positions, total, layer: knorm.retain(keys, total, Norm(rate))


def by_pyramid(pyramid: Pyramid) -> Retain:
    def retain(probs: Tensor, keys: Tensor, positions: Tensor, total: int, layer: int) -> Any:
        keep = Keep(kv_budget=pyramid.caps(LAYERS, total)[layer], kernel=pyramid.kernel)
        return fastkv.retain(probs, keys.shape[0], positions, total, keep)

    return retain


def by_snapkv(rate: float) -> Retain:
    keep = Keep(kv_rate=rate)
    return lambda probs, keys, positions, total, layer: fastkv.retain(
        probs, keys.shape[0], positions, total, keep
    )


@torch.no_grad()
def filtered(model: Any, prompt: list[int], gem: Filter, retain: Retain) -> tuple[Any, Tensor]:
    """GemFilter's second run, after each layer of which `retain` says what stays."""
    positions, slack = gemfilter.select(model, model.model.embed_tokens(torch.tensor(prompt)), gem)
    context = fastkv.Context([], len(prompt), [], positions.tolist(), slack)
    hidden = model.model.embed_tokens(torch.tensor(prompt))[positions]
    for index, layer in enumerate(model.model.layers):
        hidden, key, value, probs = fastkv.block(model, layer, hidden, positions, None)
        rows, slack = retain(probs, key, positions, len(prompt), index)
        context.slack = min(context.slack, slack)
        gather = rows[:, :, None].expand(-1, -1, key.shape[2])
        context.stored.append((key.gather(1, gather), value.gather(1, gather)))
    return context, fastkv.log_softmax(model, hidden[-1:])


def gem(policy: Filter, retain: Retain) -> Callable[..., KeptResult]:
    def score(model: Any, prompt: list[int], tokens: list[int]) -> KeptResult:
        context, row = filtered(model, prompt, policy, retain)
        with torch.no_grad():
            return context.result(tokens, [row, fastkv.decode(model, context, tokens[:-1])])

    return score


def struct(retain: Retain) -> Callable[..., KeptResult]:
    policy = StructSnap(3, struct_rate=0.4, retain=retain)
    return lambda model, prompt, tokens: structsnap.score(model, prompt, tokens, policy)


GEM = "gemfilter:layer=3,rate=0.5,kv_floor=0,window=8,kernel=7"
STRUCT = "structkv:pivot=3,struct_rate=0.4,kv_rate=1,kv_floor=0"
PYRAMID = Pyramid(kv_rate=0.2, groups=4)
CASES: dict[str, Callable[..., KeptResult]] = {
    f"{STRUCT}+knorm:kv_rate=0.2,kv_floor=0": struct(by_norm(0.2)),
    f"{STRUCT}+pyramidkv:kv_rate=0.2,kv_floor=0,groups=4": struct(by_pyramid(PYRAMID)),
    "gemfilter:layer=3,rate=0.5,kv_floor=0+knorm:kv_rate=0.2,kv_floor=0": gem(
        Filter(3, 0.5), by_norm(0.2)
    ),
    f"{GEM}+snapkv:kv_rate=0.2,kv_floor=0": gem(Filter(3, 0.5, window=8, kernel=7), by_snapkv(0.2)),
    f"{GEM}+pyramidkv:kv_rate=0.2,kv_floor=0,groups=4": gem(
        Filter(3, 0.5, window=8, kernel=7), by_pyramid(PYRAMID)
    ),
}


@pytest.mark.parametrize("tokens", [pytest.param(None, marks=nightly), 17])
def test_retention_follows_another_method_s_propagation(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tokens: int | None
) -> None:
    """In one batch, in chunks; `tokens` of a pass at most, so that a rerun takes several."""
    inside.use_dense_ops(monkeypatch)
    model, names = tiny(), [*CASES] * 3
    prompts = distinct_prompts([97 + 23 * i % 300 for i in range(len(names))])
    with running(model, "full", config={"kv_layout": [*CASES]}, max_num_seqs=16) as engine:
        if tokens is not None:
            inside.limit_pass(engine, tokens)
        answers = engine.generate(prompts, 4, names)
        engine.assert_idle()
    loaded, near_ties = fastkv.load(model), 0
    for name, answer in zip(names, answers, strict=True):
        expected = CASES[name](loaded, answer.prompt, answer.tokens)
        error = float((answer.logprobs - expected.chosen_logprob).abs().max())
        if expected.argmax == answer.tokens and error < ATOL:
            continue
        assert expected.slack < 5e-5, f"{name}: {len(answer.prompt)} tokens, off by {error}"
        near_ties += 1
    assert near_ties <= 2
