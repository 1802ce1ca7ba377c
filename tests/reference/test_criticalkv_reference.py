"""The CriticalKV reference against brute force, against SnapKV, and against its definition."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import criticalkv, fastkv, pyramidkv, speed, structkv
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
from .criticalkv import Critical
from .fastkv import Keep
from .pyramidkv import Pyramid
from .structkv import Struct

CRITICAL = Critical(kv_rate=0.5, window=4, kernel=5)
GENERATED = prompt_of(STEPS, seed=99)


@pytest.mark.parametrize("length", [1, 9, 65])
def test_keeping_all_is_full(model: PreTrainedModel, length: int) -> None:
    prompt = prompt_of(length)
    full = speed.score(model, prompt, GENERATED, cutoff=None)
    for policy in (Critical(kv_rate=1), Critical(kv_budget=65), Critical(window=70)):
        result = criticalkv.score(model, prompt, GENERATED, policy)
        assert change(result, full).max() < ATOL and result.slack == float("inf")
        assert result.retained == [[list(range(length))] * len(result.retained[0])] * LAYERS


@torch.no_grad()
def norms_of(model: PreTrainedModel, prompt: list[int]) -> list[list[list[float]]]:
    """By layer, query head and position, the norm of what o_proj makes of that head's value.

    Each head's value goes through o_proj alone, other heads being 0.
    """
    values: list[Tensor] = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda *call: values.append(call[2][0]))
        for layer in model.model.layers
    ]
    masked(model, prompt)
    for hook in hooks:
        hook.remove()
    heads, dim = model.config.num_attention_heads, model.model.layers[0].self_attn.head_dim
    shared = heads // model.config.num_key_value_heads
    norms = []
    for layer, value in zip(model.model.layers, values, strict=True):
        by_head = []
        for head in range(heads):
            alone = torch.zeros(len(prompt), heads * dim)
            own = value[:, head // shared * dim : (head // shared + 1) * dim]
            alone[:, head * dim : (head + 1) * dim] = own
            by_head.append(layer.self_attn.o_proj(alone).norm(dim=1).tolist())
        norms.append(by_head)
    return norms


@pytest.mark.parametrize(
    "policy",
    [
        CRITICAL,
        replace(CRITICAL, kv_rate=0.35),  # an odd number of rows outside the window
        replace(CRITICAL, window=1, kernel=1, kv_budget=2),  # none by attention alone
        replace(CRITICAL, kv_rate=0.1, kv_floor=20),
    ],
)
def test_brute_force(model: PreTrainedModel, policy: Critical) -> None:
    prompt, exist = prompt_of(30, seed=5), list(range(30))
    result = criticalkv.score(model, prompt, GENERATED, policy)
    window, kv_heads = policy.window, model.config.num_key_value_heads
    cap = policy.kv_budget or max(int(30 * policy.kv_rate), policy.kv_floor)
    retained = []
    for probs, norms in zip(masked(model, prompt).probs, norms_of(model, prompt), strict=True):
        layer = []
        for heads in torch.arange(len(probs)).view(kv_heads, -1).tolist():
            scores = pooled(probs, heads, exist, window, policy.kernel)
            unpooled = pooled(probs, heads, exist, window, 1)
            first = best(scores, (cap - window) // 2, unpooled)
            weighted = {
                j: (score / len(heads) / window + 1e-4) * sum(norms[head][j] for head in heads)
                for j, score in scores.items()
                if j not in first
            }
            second = best(weighted, cap - window - len(first), unpooled)
            layer.append(sorted([*first, *second, *exist[-window:]]))
        retained.append(layer)
    assert result.slack > SAFE / 10 and result.retained == retained
    assert change(result, expected(model, prompt, GENERATED, retained)).max() < ATOL


@pytest.mark.parametrize("kernel", [1, 5])
def test_one_set_for_all_heads(model: PreTrainedModel, kernel: int) -> None:
    """StructKV's retention: attention and products are added up over all heads, then chosen by."""
    prompt, exist, window, cap = prompt_of(30, seed=6), list(range(30)), 4, 15
    kv_heads = model.config.num_key_value_heads
    struct = Struct(
        LAYERS - 1, struct_rate=1, kv_budget=cap, window=window, kernel=kernel, score="critical"
    )
    result = structkv.score(model, prompt, GENERATED, struct)
    retained = []
    for probs, norms in zip(masked(model, prompt).probs, norms_of(model, prompt), strict=True):
        groups = torch.arange(len(probs)).view(kv_heads, -1).tolist()
        total, peaks = (
            pooled(probs, range(len(probs)), exist, window, width) for width in (kernel, 1)
        )
        first = best(total, (cap - window) // 2, peaks)
        weighted = {j: 0.0 for j in total if j not in first}
        for heads in groups:
            for j, score in pooled(probs, heads, exist, window, kernel).items():
                if j in weighted:
                    mean = score / len(heads) / window + 1e-4
                    weighted[j] += mean * sum(norms[head][j] for head in heads) / len(heads)
        second = best(weighted, cap - window - len(first), peaks)
        retained.append([sorted([*first, *second, *exist[-window:]])] * kv_heads)
    assert result.slack > SAFE / 10 and result.retained == retained
    assert change(result, expected(model, prompt, GENERATED, retained)).max() < ATOL


def test_other_methods_retain_by_it(model: PreTrainedModel) -> None:
    prompt = prompt_of(60, seed=7)
    alone = criticalkv.score(model, prompt, GENERATED, CRITICAL)
    same = {"kv_rate": 0.5, "window": 4, "kernel": 5, "score": "critical"}
    own = Struct(LAYERS - 1, struct_rate=1, heads="own", **same)
    for reference, policy in ((pyramidkv, Pyramid(groups=1, **same)), (structkv, own)):
        assert reference.score(model, prompt, GENERATED, policy).retained == alone.retained
    steep = Pyramid(groups=LAYERS, beta=4, **same)
    result = pyramidkv.score(model, prompt, GENERATED, steep)
    assert [len(layer[0]) for layer in result.retained] == steep.caps(LAYERS, 60)


def test_values_of_one_length_are_snapkv(llama: PreTrainedModel) -> None:
    """Where all norms are equal, both stages go by attention alone."""
    probs = torch.rand(4, 60, 60, generator=torch.Generator().manual_seed(0)).tril()
    value = torch.eye(32)[torch.arange(60) % 32].expand(KV_HEADS, -1, -1)
    weight = torch.eye(32).repeat(1, 4)
    rows, _ = criticalkv.retain(probs, value, weight, 60, Critical(kv_rate=0.5, kernel=1))
    same, _ = fastkv.retain(probs, KV_HEADS, torch.arange(60), 60, Keep(kv_rate=0.5, kernel=1))
    assert torch.equal(rows, same)


def test_propagation_is_fastkv_s(llama: PreTrainedModel) -> None:
    prompt = prompt_of(120)
    fast = fastkv.score(llama, prompt, GENERATED, Keep(tsp_layer=1, tsp_rate=0.4, kv_rate=0.2))
    policy = Critical(kv_rate=0.2, tsp_layer=1, tsp_rate=0.4)
    result = criticalkv.score(llama, prompt, GENERATED, policy)
    assert result.propagated == fast.propagated and len(fast.propagated) == 48
    assert result.retained != fast.retained
    assert [[len(h) for h in layer] for layer in result.retained] == [[24] * KV_HEADS] * LAYERS


def test_every_part_of_the_policy_shows(model: PreTrainedModel) -> None:
    """A wrong rate, window or kernel, and SnapKV itself, must not pass unnoticed."""
    prompt, generated = prompt_of(300, seed=300), prompt_of(12, seed=98)
    policy = Critical(kv_rate=0.2)
    result = criticalkv.score(model, prompt, generated, policy)
    for wrong in ({"kv_rate": 0.15}, {"window": 7}, {"kernel": 5}):
        other = criticalkv.score(model, prompt, generated, replace(policy, **wrong))
        assert change(other, result).median() > CLEAR, wrong
    snap = fastkv.score(model, prompt, generated, Keep(kv_rate=0.2))
    assert change(snap, result).median() > CLEAR


@pytest.mark.parametrize(("wrong", "message"), [({"window": 0}, "window"), ({"kernel": 4}, "odd")])
def test_bad_policies(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Critical(**wrong)
