"""The references of hybrids against transformers' own forward, and against the other references."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.nightly import by_day
from torch import Tensor
from transformers import PreTrainedModel

from . import (
    criticalkv,
    fastkv,
    fier,
    gemfilter,
    hybrid,
    hybrid_selection,
    hybrids,
    knorm,
    masked,
    pyramidkv,
    speed,
    structkv,
)
from .criticalkv import Critical
from .fastkv import Keep
from .fier import Retrieve
from .gemfilter import Filter
from .knorm import Norm
from .models import build_model
from .pyramidkv import Pyramid
from .structkv import Struct

pytestmark = pytest.mark.usefixtures("one_thread")

# Longer than the window, which then hides something from generated rows and from prompt rows.
STEPS, PROMPT = 4, 100
ATOL = 3e-5
CLEAR = 1e-2  # The least change of a logprob that counts as a change.
NAMES = tuple(hybrids.HYBRIDS)
# Windows, caps, sinks, gates behind attention, and positions that only other layers know.
BY_DAY = ("gemma3_text", "gemma2", "gpt_oss", "qwen3_next", "granitemoehybrid")
some = pytest.mark.parametrize(
    "model", by_day(NAMES, {NAMES.index(name) for name in BY_DAY}), indirect=True
)
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


@some
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


def by_masks(model: PreTrainedModel, prompt: list[int], result: Any) -> Tensor:
    """(S, V) log-softmax behind `result` by transformers' attention and what it must not see."""
    count, total = len(prompt), len(prompt) + len(result.tokens) - 1
    hidden = {}
    for layer, heads in zip(hybrid.full_layers(model), result.retained, strict=True):
        each = torch.zeros(len(heads), total, total, dtype=torch.bool)
        for head, kept in enumerate(heads):
            dropped = [j for j in range(count) if j not in set(kept)]
            each[head, count:, dropped] = True
        shared = model.config.num_attention_heads // len(heads)
        hidden[layer] = each.repeat_interleave(shared, 0)
    return hiding(model, prompt + result.tokens[:-1], hidden)[count - 1 :]


def hiding(model: PreTrainedModel, tokens: list[int], hidden: dict[int, Tensor]) -> Tensor:
    """(n, V) log-softmax of transformers' eager attention, some of its mask hidden besides.

    The model's own attention applies its scale, cap, window and sinks; nothing of `hybrid` and
    `masked` is in between. hidden: bool (n, n), or (H, n, n), by layer.
    """
    hooks = []
    for module in model.modules():
        if getattr(module, "layer_idx", None) in hidden and hasattr(module, "q_proj"):
            hook = _hook(hidden[module.layer_idx])
            hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    assert len(hooks) == len(hidden)
    try:
        return stock(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()


def _hook(hidden: Tensor) -> Any:
    def hook(_module: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        assert mask is not None and mask.shape[-2:] == hidden.shape[-2:]
        mask = mask.masked_fill(hidden, torch.finfo(torch.float32).min)
        return args, kwargs | {"attention_mask": mask}

    return hook


@pytest.mark.parametrize("model", ["gemma3_text", "gpt_oss", "cohere2"], indirect=True)
@pytest.mark.parametrize(("anchors", "tail"), [(1, 1), (2, 3)])
def test_speed_holds_no_anchors_where_layers_slide(
    model: PreTrainedModel, anchors: int, tail: int
) -> None:
    prompt, generated = tokens_of(70), tokens_of(STEPS, seed=1)
    options = {"anchors": anchors, "tail": tail}
    full = hybrid.score(model, prompt, generated, hybrid.FULL)
    uncut = hybrid.cut(model, prompt, generated, cutoff=8, **options)
    assert change(uncut, full).max() < ATOL
    result = hybrid.cut(model, prompt, generated, cutoff=4, **options)
    assert change(result, full).min() > CLEAR
    tokens = prompt + generated[:-1]
    hidden = {}
    for layer in range(4, 8):
        each = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        each[:, anchors : 70 - tail] = True
        if layer not in hybrid.full_layers(model):
            each[70 - tail :, : 70 - tail] = True
        each.fill_diagonal_(False)
        hidden[layer] = each
    expected = hiding(model, tokens, hidden)[69:]
    torch.testing.assert_close(result.logprobs, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
def test_speed_below_a_recurrent_layer_is_refused(model: PreTrainedModel) -> None:
    prompt, generated = tokens_of(PROMPT), tokens_of(STEPS, seed=1)
    with pytest.raises(ValueError, match="above the recurrent layer 6"):
        hybrid.cut(model, prompt, generated, cutoff=6)
    assert hybrid.cut(model, prompt, generated, cutoff=7).tokens == generated


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
    for cutoff in (2, None):
        theirs = speed.score(model, prompt, generated, cutoff=cutoff, anchors=2, tail=3)
        ours = hybrid.cut(model, prompt, generated, cutoff=cutoff, anchors=2, tail=3)
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


SELECTING: list[tuple[Any, Any]] = [
    (fastkv, Keep(tsp_layer=1, tsp_rate=0.4, kv_rate=0.3)),
    (fastkv, Keep(tsp_layer=1, tsp_rate=0.4, tsp_reduction="max", kv_rate=1.0)),
    (criticalkv, Critical(tsp_layer=1, tsp_rate=0.5, kv_rate=0.3)),
    (structkv, Struct(2, struct_rate=0.3, kv_rate=0.2)),
    (structkv, Struct(1, struct_rate=0.3, heads="own")),
    (gemfilter, Filter(1, rate=0.3, window=4)),
]


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_selection_without_windows_is_the_other_references(model: PreTrainedModel) -> None:
    prompt, generated = tokens_of(PROMPT), tokens_of(STEPS, seed=1)
    for module, policy in SELECTING:
        theirs = module.score(model, prompt, generated, policy)
        ours = hybrid_selection.score(model, prompt, generated, policy)
        assert ours.propagated == theirs.propagated and len(ours.propagated) < PROMPT
        assert ours.retained == theirs.retained
        assert change(ours, theirs).max() < ATOL


@pytest.mark.parametrize("model", ["gemma3_text"], indirect=True)
def test_selection_beside_windows(model: PreTrainedModel) -> None:
    """The last tokens go on; with all chosen before them it is the model itself."""
    total = hybrids.WINDOW + 60
    prompt, generated = tokens_of(total), tokens_of(STEPS, seed=1)
    full = hybrid.score(model, prompt, generated, hybrid.FULL)
    for policy, chosen in (
        (Keep(tsp_layer=3, tsp_rate=0.2), int(total * 0.2) - 8),
        (Struct(3, struct_rate=0.2, kv_rate=1.0), int(total * 0.2) - 8),
        (Filter(3, rate=0.2), int(total * 0.2) - 1),
    ):
        found = hybrid_selection.score(model, prompt, generated, policy)
        last = list(range(total - hybrids.WINDOW, total))
        assert found.propagated[chosen:] == last and found.propagated[:chosen] < last
        assert change(found, full).max() > CLEAR
        # One token fewer than all would have to go on.
        whole = replace(policy, **{RATES[type(policy)]: (60 + 8) / total + 0.01})
        found = hybrid_selection.score(model, prompt, generated, whole)
        assert found.propagated == list(range(total))
        assert change(found, full).max() < ATOL


RATES = {Keep: "tsp_rate", Struct: "struct_rate", Filter: "rate"}


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
