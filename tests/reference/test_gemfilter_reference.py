"""The GemFilter reference against brute force, against full attention, and against its siblings."""

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from . import fastkv, gemfilter, speed
from .conftest import (
    ATOL,
    CLEAR,
    KV_HEADS,
    LAYERS,
    SAFE,
    STEPS,
    best,
    change,
    expected,
    masked,
    pooled,
    prompt_of,
)
from .fastkv import Keep
from .gemfilter import Filter

GEM = Filter(layer=1, rate=0.3)
GENERATED = prompt_of(STEPS, seed=99)


@pytest.mark.parametrize("length", [1, 9, 65])
def test_choosing_all_is_full(model: PreTrainedModel, length: int) -> None:
    prompt = prompt_of(length)
    full = speed.score(model, prompt, GENERATED, cutoff=None)
    for gem in (Filter(1, rate=1), Filter(3, rate=1), Filter(0, window=65)):
        result = gemfilter.score(model, prompt, GENERATED, gem)
        assert change(result, full).max() < ATOL and result.slack == float("inf")
        assert result.retained == [[list(range(length))] * len(result.retained[0])] * LAYERS
        assert result.propagated == list(range(length))


@pytest.mark.parametrize(
    "gem",
    [
        GEM,
        replace(GEM, layer=0, rate=0.5),
        replace(GEM, layer=LAYERS - 1),
        replace(GEM, window=4, kernel=7),
        replace(GEM, kernel=1),
        replace(GEM, rate=0.97),  # all but one
        replace(GEM, rate=0.07),
    ],
)
def test_brute_force(model: PreTrainedModel, gem: Filter) -> None:
    """The dropped tokens run too, in the brute force, and nobody reads them."""
    prompt, exist, heads = prompt_of(30, seed=5), list(range(30)), model.config.num_attention_heads
    result = gemfilter.score(model, prompt, GENERATED, gem)
    probs = masked(model, prompt).probs[gem.layer]
    scores = pooled(probs, range(heads), exist, gem.window, gem.kernel)
    unpooled = pooled(probs, range(heads), exist, gem.window, 1)
    chosen = best(scores, int(30 * gem.rate) - gem.window, unpooled) + exist[-gem.window :]
    assert len(chosen) == int(30 * gem.rate)
    assert result.slack > SAFE and result.propagated == chosen
    retained = [[chosen] * model.config.num_key_value_heads] * LAYERS
    assert result.retained == retained
    brute = expected(model, prompt, GENERATED, retained, computed=[chosen] * LAYERS)
    assert change(result, brute).max() < ATOL


def test_the_stock_model_on_the_chosen_tokens(model: PreTrainedModel) -> None:
    """At the positions that they had: numbered anew, they say something else."""
    prompt = prompt_of(80, seed=4)
    result = gemfilter.score(model, prompt, GENERATED, GEM)
    chosen = result.propagated
    tokens = torch.tensor([[prompt[j] for j in chosen] + GENERATED[:-1]])
    own = torch.tensor([chosen + list(range(80, 80 + STEPS - 1))])
    with torch.no_grad():
        kept, renumbered = (
            model(tokens, position_ids=ids).logits[0, len(chosen) - 1 :].log_softmax(dim=-1)
            for ids in (own, torch.arange(tokens.shape[1])[None])
        )
    assert (kept - result.logprobs).abs().max() < ATOL
    assert (renumbered - result.logprobs).abs().max() > CLEAR


def test_fastkv_chooses_the_same_tokens(llama: PreTrainedModel) -> None:
    """Only what then runs differs: the chosen tokens' own context, and the layers below."""
    prompt = prompt_of(100, seed=2)
    for gem in (Filter(1, rate=0.2, window=8, kernel=7), Filter(2, rate=0.4)):
        mine = gemfilter.score(llama, prompt, GENERATED, gem)
        keep = Keep(tsp_layer=gem.layer, tsp_rate=gem.rate, window=gem.window, kernel=gem.kernel)
        theirs = fastkv.score(llama, prompt, GENERATED, keep)
        assert mine.propagated == theirs.propagated and mine.slack == theirs.slack
        assert change(mine, theirs).min() > CLEAR


def test_counts(llama: PreTrainedModel) -> None:
    for gem, length, kept in (
        (Filter(0), 7, 1),  # the last token alone
        (Filter(0), 1, 1),
        (Filter(1), 101, 10),
        (Filter(1, rate=0.29), 100, 28),  # int(28.999999999999996)
        (Filter(1, window=12), 101, 12),  # the window alone
        (Filter(1, window=12), 12, 12),
        (Filter(1, kv_floor=30), 101, 30),
        (Filter(1, kv_floor=30), 12, 12),
        (Filter(1, window=12), 5, 5),
    ):
        result = gemfilter.score(llama, prompt_of(length), GENERATED, gem)
        chosen = result.propagated
        assert len(chosen) == kept and chosen == sorted(set(chosen))
        assert chosen[-gem.window :] == list(range(length))[-gem.window :]
        assert result.retained == [[chosen] * KV_HEADS] * LAYERS
        if kept == min(gem.window, length):
            assert result.slack == float("inf")


def test_generated_tokens_stay(llama: PreTrainedModel) -> None:
    prompt = prompt_of(60)
    context, row = gemfilter.prefill(llama, prompt, GEM)
    rows = [row, *(fastkv.decode(llama, context, [token]) for token in GENERATED[:-1])]
    scored = gemfilter.score(llama, prompt, GENERATED, GEM)
    assert (torch.cat(rows) - scored.logprobs).abs().max() < ATOL
    for key, value in context.stored:
        assert key.shape[:2] == value.shape[:2] == (KV_HEADS, 18 + STEPS - 1)
    # Prefill itself runs the chosen tokens alone: the first token differs too.
    full = speed.score(llama, prompt, GENERATED, cutoff=None)
    assert change(scored, full).min() > CLEAR


def test_every_part_of_the_policy_shows(model: PreTrainedModel) -> None:
    """A wrong layer, rate, window or kernel must not pass unnoticed."""
    prompt, generated, gem = prompt_of(300, seed=300), prompt_of(12, seed=98), Filter(1, rate=0.2)
    result = gemfilter.score(model, prompt, generated, gem)
    for wrong in (
        {"layer": 0},
        {"layer": 2},
        {"rate": 0.25},
        {"rate": 1.0},
        {"window": 2},
        {"kernel": 1},
        {"kernel": 7},
    ):
        other = gemfilter.score(model, prompt, generated, replace(gem, **wrong))
        assert change(other, result).median() > CLEAR, wrong


def test_slack_is_the_distance_to_another_choice(llama: PreTrainedModel) -> None:
    """Float64 decides as float32 does wherever the slack says so."""
    prompt = prompt_of(200, seed=4)
    result = gemfilter.score(llama, prompt, GENERATED, GEM)
    assert SAFE < result.slack < 0.5
    try:
        exact = gemfilter.score(llama.double(), prompt, GENERATED, GEM)
    finally:
        llama.float()
    assert exact.propagated == result.propagated
    assert exact.slack == pytest.approx(result.slack, abs=SAFE / 2)


@pytest.mark.parametrize(("wrong", "message"), [({"window": 0}, "window"), ({"kernel": 4}, "odd")])
def test_bad_policies(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Filter(1, **wrong)


def test_a_layer_that_the_model_has_not(llama: PreTrainedModel) -> None:
    for layer in (-1, LAYERS):
        with pytest.raises(ValueError, match="4 layers"):
            gemfilter.score(llama, prompt_of(40), GENERATED, Filter(layer))
