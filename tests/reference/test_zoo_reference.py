"""Every architecture of the zoo: the references against transformers' own forward."""

from functools import cache
from pathlib import Path

import pytest
import torch
from support.nightly import by_day
from torch import Tensor
from transformers import PreTrainedModel

from . import criticalkv, fastkv, fier, masked, speed, structkv, swiftkv, zoo
from .criticalkv import Critical
from .fastkv import Keep, KeptResult
from .fier import Retrieve
from .models import build_model
from .structkv import Struct
from .swiftkv import Swift

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, CUTOFF, PROMPT = 5, 5, 60
# Rounding between two orders of the same float32 sums; engine tests have 1e-4.
ATOL = 3e-5
# The same between two ways of the same sums.
CLOSE = 1e-5
# The least change of a logprob that counts as a change: a hundred times what engine tests allow.
CLEAR = 1e-2
# One architecture for each way of being unlike Llama: experts, dense layers below them, norms
# after sublayers, multipliers, parallel sublayers, learned positions, layers without positions.
BY_DAY = ("qwen3_moe", "glm4_moe", "granitemoe", "gemma", "cohere", "glm4", "gpt2", "smollm3")
NAMES = tuple(zoo.ZOO)
some = pytest.mark.parametrize(
    "model", by_day(NAMES, {NAMES.index(name) for name in BY_DAY}), indirect=True
)
every = pytest.mark.parametrize("model", NAMES, indirect=True)


@pytest.fixture(scope="module")
def load_once(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    @cache
    def load(name: str) -> PreTrainedModel:
        return speed.load(zoo.build(tmp_path_factory.mktemp(name), name))

    return load


@pytest.fixture
def model(request: pytest.FixtureRequest, load_once) -> PreTrainedModel:  # type: ignore[no-untyped-def]
    return load_once(request.param)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, zoo.VOCAB, (length,), generator=generator).tolist()


def change(a: speed.Result, b: speed.Result) -> Tensor:
    """(S,) float32: largest difference of a logprob at each step."""
    return (a.logprobs - b.logprobs).abs().amax(dim=1)


@torch.no_grad()
def stock(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """(n, V) log-softmax of transformers' own forward."""
    return model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)


@every
@torch.no_grad()
def test_full_is_transformers(model: PreTrainedModel) -> None:
    tokens = prompt_of(PROMPT)
    seen, expected = masked.causal(PROMPT, PROMPT), stock(model, tokens)
    caught: list[masked.Attended] = []
    actual = masked.forward(model, tokens, lambda _: seen, caught=caught)
    torch.testing.assert_close(actual, expected, atol=CLOSE, rtol=0)
    heads, kv_heads = model.config.num_attention_heads, len(caught[0].key)
    for layer in caught:
        assert layer.query.shape == (heads, PROMPT, zoo.HEAD_DIM)
        assert layer.key.shape == layer.value.shape == (kv_heads, PROMPT, zoo.HEAD_DIM)
        assert layer.probs.shape == (heads, PROMPT, PROMPT)
    assert len(caught) == zoo.LAYERS
    # A layer at a time, and what is caught is what its blocks give.
    hidden = masked.embed(model, tokens)
    for layer, one in zip(masked.layers_of(model), caught, strict=True):
        hidden, key, value, probs = fastkv.block(model, layer, hidden, torch.arange(PROMPT), None)
        for a, b in ((key, one.key), (value, one.value), (probs, one.probs)):
            torch.testing.assert_close(a, b, atol=CLOSE, rtol=0)
    torch.testing.assert_close(masked.log_softmax(model, hidden), expected, atol=CLOSE, rtol=0)


@every
def test_speed_at_its_limits(model: PreTrainedModel) -> None:
    prompt, generated = prompt_of(PROMPT), prompt_of(STEPS, seed=1)
    full = speed.score(model, prompt, generated, cutoff=None)
    expected = stock(model, prompt + generated[:-1])[PROMPT - 1 :]
    torch.testing.assert_close(full.logprobs, expected, atol=ATOL, rtol=0)
    assert change(speed.score(model, prompt, generated, cutoff=zoo.LAYERS), full).max() == 0
    cut = speed.score(model, prompt, generated, cutoff=CUTOFF)
    assert change(cut, full).min() > CLEAR
    # Rows that nobody sees are rows that do not exist.
    dropped = fastkv.score(model, prompt, generated, Keep(cutoff=CUTOFF))
    assert change(cut, dropped).max() < ATOL


@some
@pytest.mark.parametrize("cutoff", [None, CUTOFF])
def test_row_by_row_is_dense(model: PreTrainedModel, cutoff: int | None) -> None:
    prompt = prompt_of(PROMPT)
    rows = speed.generate(model, prompt, cutoff=cutoff, max_tokens=STEPS)
    dense = speed.generate(model, prompt, cutoff=cutoff, max_tokens=STEPS, dense=True)
    kept = fastkv.generate(model, prompt, Keep(cutoff=cutoff), max_tokens=STEPS)
    assert rows.tokens == dense.tokens == kept.tokens
    assert change(rows, dense).max() < ATOL and change(kept, dense).max() < ATOL


@torch.no_grad()
def by_masks(model: PreTrainedModel, prompt: list[int], result: KeptResult, last: int) -> Tensor:
    """(S, V) log-softmax behind `result` by visibility alone, in one pass over all tokens.

    Layers above `last` compute the propagated prompt tokens; prompt rows see what is computed, and
    generated ones what is retained.
    """
    tokens = prompt + result.tokens[:-1]
    count, total = len(prompt), len(tokens)

    def sees(layer: int) -> Tensor:
        retained = result.retained[layer]
        each = []
        for kept in retained:
            seen = masked.causal(total, total)
            if layer > last:
                absent = [j for j in range(count) if j not in set(result.propagated)]
                seen[:count, absent] = False
            seen[count:, [j for j in range(count) if j not in set(kept)]] = False
            each.append(seen | torch.eye(total, dtype=torch.bool))
        shared = model.config.num_attention_heads // len(retained)
        return torch.stack(each).repeat_interleave(shared, 0)

    return masked.forward(model, tokens, sees, last=len(result.tokens))


@some
def test_methods_are_their_masks(model: PreTrainedModel) -> None:
    prompt, generated = prompt_of(PROMPT), prompt_of(STEPS, seed=1)
    full = speed.score(model, prompt, generated, cutoff=None)
    keep = Keep(tsp_layer=3, tsp_rate=0.6, kv_rate=0.3)
    results: list[KeptResult] = [
        fastkv.score(model, prompt, generated, keep),
        fastkv.score(model, prompt, generated, Keep(kv_rate=0.3)),
        structkv.score(model, prompt, generated, Struct(pivot=3, struct_rate=0.6, kv_rate=0.3)),
        criticalkv.score(model, prompt, generated, Critical(kv_rate=0.3)),
    ]
    for result in results:
        # No choice hangs on rounding.
        assert result.slack > 1e-5
        assert change(result, full).max() > CLEAR
        expected = by_masks(model, prompt, result, last=3)
        torch.testing.assert_close(result.logprobs, expected, atol=ATOL, rtol=0)


@some
def test_retrieval_and_replaced_entries(model: PreTrainedModel) -> None:
    prompt, generated = prompt_of(PROMPT), prompt_of(STEPS, seed=1)
    full = speed.score(model, prompt, generated, cutoff=None)
    every_entry = fier.score(model, prompt, generated, Retrieve(budget=PROMPT + STEPS, group=8))
    assert change(every_entry, full).max() < ATOL
    few = fier.score(model, prompt, generated, Retrieve(budget=16, group=8))
    assert change(few, full)[1:].max() > CLEAR and change(few, full)[0] < ATOL
    swift = swiftkv.score(model, prompt, generated, Swift(cutoff=CUTOFF))
    assert change(swift, full).max() > CLEAR
    # The first layer above the cutoff gets the entries that it would have made.
    last = swiftkv.score(model, prompt, generated, Swift(cutoff=zoo.LAYERS - 1))
    assert change(last, full).max() < ATOL


@some
def test_rounding_stays_far_below_what_tests_allow(model: PreTrainedModel) -> None:
    """Above all, no router is so near a tie that another order of sums takes another expert."""
    tokens = prompt_of(170)
    single, experts = stock(model, tokens), model.config._experts_implementation
    model.config._experts_implementation = "eager"  # The other ones have no float64.
    try:
        double = stock(model.double(), tokens)
    finally:
        model.float()
        model.config._experts_implementation = experts
    assert (single - double).abs().max() < 5e-5


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    paths = [
        zoo.build(tmp_path / str(i), "glm4_moe", seed=seed) for i, seed in enumerate((3, 3, 4))
    ]
    weights = [(path / "model.safetensors").read_bytes() for path in paths]
    assert weights[0] == weights[1] != weights[2]


def test_windows_are_refused(tmp_path: Path) -> None:
    path = build_model(tmp_path, arch="mistral", layers=2, sliding_window=8)
    with pytest.raises(ValueError, match="window"):
        speed.score(path, prompt_of(20), [5], cutoff=None)
