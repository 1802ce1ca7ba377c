"""The references of hybrids against transformers' own forward, and against the other references."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import criticalkv, fastkv, fier, hybrid, hybrids, knorm, masked, pyramidkv, speed
from .criticalkv import Critical
from .fastkv import Keep
from .fier import Retrieve
from .knorm import Norm
from .models import build_model
from .pyramidkv import Pyramid

pytestmark = pytest.mark.usefixtures("one_thread")

# Longer than the window, which then hides something from generated rows and from prompt rows.
STEPS, PROMPT = 4, 100
ATOL = 3e-5
CLEAR = 1e-2  # The least change of a logprob that counts as a change.
NAMES = tuple(hybrids.HYBRIDS)
every = pytest.mark.parametrize("model", NAMES, indirect=True)


@pytest.fixture(scope="module")
def load_once(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    @cache
    def load(name: str) -> PreTrainedModel:
        path = tmp_path_factory.mktemp(name)
        if name == "llama":
            return speed.load(build_model(path, arch="llama", layers=4))
        return speed.load(hybrids.build(path, name))

    return load


@pytest.fixture
def model(request: pytest.FixtureRequest, load_once) -> PreTrainedModel:  # type: ignore[no-untyped-def]
    return load_once(request.param)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (length,), generator=generator).tolist()


def change(a: speed.Result, b: speed.Result) -> Tensor:
    """(S,) float32: largest difference of a logprob at each step."""
    return (a.logprobs - b.logprobs).abs().amax(dim=1)


@torch.no_grad()
def stock(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """(n, V) log-softmax of transformers' own forward, with its own masks."""
    return model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)


@every
def test_full_is_transformers(model: PreTrainedModel) -> None:
    prompt, generated = tokens_of(PROMPT), tokens_of(STEPS, seed=1)
    full = hybrid.score(model, prompt, generated, hybrid.FULL)
    expected = stock(model, prompt + generated[:-1])[PROMPT - 1 :]
    torch.testing.assert_close(full.logprobs, expected, atol=ATOL, rtol=0)
    total = [list(range(PROMPT))]
    assert all(heads == total * len(heads) for heads in full.retained)


@every
def test_what_is_full(model: PreTrainedModel) -> None:
    types = getattr(model.config, "layer_types", None) or model.config.layers_block_type
    names = ("full_attention", "attention", "hybrid")
    assert hybrid.full_layers(model) == [i for i, name in enumerate(types) if name in names]
    assert hybrid.is_hybrid(model)


@every
def test_policies_change_full_layers_alone(model: PreTrainedModel) -> None:
    prompt, generated = tokens_of(PROMPT), tokens_of(STEPS, seed=1)
    full = hybrid.score(model, prompt, generated, hybrid.FULL)
    count = len(hybrid.full_layers(model))
    for policy, kept in (
        (Keep(kv_rate=0.2), 20),
        (Critical(kv_rate=0.3), 30),
        (Norm(kv_rate=0.25), 25),
        (Keep(sinks=4, recent=20), 24),
    ):
        result = hybrid.score(model, prompt, generated, policy)
        assert len(result.retained) == count
        assert {len(head) for heads in result.retained for head in heads} == {kept}
        # The prompt's last row reads all; later ones do not.
        assert change(result, full)[0] < ATOL and change(result, full)[1:].max() > CLEAR
        expected = by_masks(model, prompt, result)
        torch.testing.assert_close(result.logprobs, expected, atol=ATOL, rtol=0)
    few = hybrid.read(model, prompt, generated, Retrieve(budget=24, group=8, dense_layers=0))
    assert change(few, full)[0] < ATOL and change(few, full)[1:].max() > CLEAR
    everything = hybrid.read(model, prompt, generated, Retrieve(budget=PROMPT + STEPS, group=8))
    assert change(everything, full).max() < ATOL


@torch.no_grad()
def by_masks(model: PreTrainedModel, prompt: list[int], result: Any) -> Tensor:
    """(S, V) log-softmax by transformers' eager attention under masks that hide what was dropped.

    The model's own attention applies its scale, cap and sinks, and gets its own mask with more
    hidden in full layers; nothing of `hybrid` and `masked` is in between.
    """
    layers = dict(zip(hybrid.full_layers(model), result.retained, strict=True))
    tokens, count = prompt + result.tokens[:-1], len(prompt)
    hooks = []
    for module in model.modules():
        if getattr(module, "layer_idx", None) in layers and hasattr(module, "q_proj"):
            hidden = _hidden(layers[module.layer_idx], model.config, len(tokens), count)
            hooks.append(module.register_forward_pre_hook(_hiding(hidden), with_kwargs=True))
    assert len(hooks) == len(layers)
    try:
        return stock(model, tokens)[count - 1 :]
    finally:
        for hook in hooks:
            hook.remove()


def _hidden(heads: list[list[int]], config: Any, total: int, count: int) -> Tensor:
    """(1, H, total, total) float32: minus infinity where generated rows see nothing."""
    each = []
    for kept in heads:
        dropped = [j for j in range(count) if j not in set(kept)]
        hidden = torch.zeros(total, total)
        hidden[count:, dropped] = torch.finfo(torch.float32).min
        each.append(hidden)
    shared = config.num_attention_heads // len(heads)
    return torch.stack(each).repeat_interleave(shared, 0)[None]


def _hiding(hidden: Tensor) -> Any:
    def hook(_module: Any, args: Any, kwargs: Any) -> Any:
        causal = kwargs["attention_mask"]
        assert causal is not None and causal.shape[-2:] == hidden.shape[-2:]
        least = torch.finfo(torch.float32).min
        return args, kwargs | {"attention_mask": (causal + hidden).clamp(min=least)}

    return hook


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_without_other_layers_it_is_the_other_references(model: PreTrainedModel) -> None:
    prompt, generated = tokens_of(PROMPT), tokens_of(STEPS, seed=1)
    pairs: list[tuple[Any, Any]] = [
        (fastkv, Keep(kv_rate=0.2)),
        (fastkv, Keep(sinks=4, recent=20)),
        (criticalkv, Critical(kv_rate=0.3)),
        (knorm, Norm(kv_rate=0.25)),
        (pyramidkv, Pyramid(kv_rate=0.3, groups=2)),
    ]
    for module, policy in pairs:
        theirs = module.score(model, prompt, generated, policy)
        ours = hybrid.score(model, prompt, generated, policy)
        assert ours.retained == theirs.retained
        assert change(ours, theirs).max() < ATOL
    retrieve = Retrieve(budget=24, group=8)
    for keep in (hybrid.FULL, Keep(kv_rate=0.5)):
        theirs = fier.score(model, prompt, generated, retrieve, keep)
        ours = hybrid.read(model, prompt, generated, retrieve, keep)
        assert (ours.slots, ours.retained) == (theirs.slots, theirs.retained)
        read = [
            [[[head.positions for head in layer] for layer in step] for step in result.choices]
            for result in (ours, theirs)
        ]
        assert read[0] == read[1] and change(ours, theirs).max() < ATOL


@pytest.mark.parametrize("model", ["gemma3_text"], indirect=True)
def test_propagation_is_refused(model: PreTrainedModel) -> None:
    for policy in (Keep(cutoff=4), Keep(tsp_layer=3, tsp_rate=0.5), Critical(tsp_layer=3)):
        with pytest.raises(ValueError, match="propagates"):
            hybrid.score(model, tokens_of(20), [5], policy)


def test_sinks_take_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 5, 4, generator=generator) for _ in range(3))
    seen = masked.causal(5, 5)
    sinks = torch.tensor([1.0, -2.0])
    out, probs = masked.attention(query, key, value, 0.5, seen, 2.0, sinks)
    for head in range(2):
        logits = 2.0 * torch.tanh(query[head] @ key[head].T * 0.5 / 2.0)
        weights = logits.exp() * seen
        expected = weights / (weights.sum(1, keepdim=True) + sinks[head].exp())
        torch.testing.assert_close(probs[head], expected)
        torch.testing.assert_close(out[head], expected @ value[head])
