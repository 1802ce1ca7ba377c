"""Sequences that stand behind each other attend as they do alone."""

import math

import pytest
import torch
from transformers import AttentionInterface

from vllm_kvx.tools.tune_speed.packed_attention import NAME, Segments, attend


def dense(query, key, value, lengths, scale):
    """Softmax under a mask of all rows, in float64."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (each.double() for each in (query, key, value))
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    of = torch.arange(len(lengths), device=query.device).repeat_interleave(
        torch.tensor(lengths, device=query.device)
    )
    row = torch.arange(len(of), device=query.device)
    seen = (of[:, None] == of[None]) & (row[:, None] >= row[None])
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def drawn(lengths, heads, kv_heads, dim, device="cpu", dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    return [
        torch.randn(sum(lengths), count, dim, generator=rng).to(device, dtype).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("lengths", [(1,), (7, 1, 30, 2), (64,)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_rows_see_the_rows_before_them_of_their_sequence(lengths, heads, kv_heads):
    rows = drawn(lengths, heads, kv_heads, 16)
    found = attend(*rows, Segments.of(lengths, "cpu"), 0.3)
    expected = dense(*rows, lengths, 0.3)
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-4)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad((found * weight).sum(), rows)
    theirs = torch.autograd.grad((expected * weight).sum(), rows)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_wide_queries_and_keys_are_narrowed_to_the_values():
    """As a model's are whose weights are float32 and which computes in bfloat16."""
    lengths = (5, 3)
    query, key, value = (each.detach().transpose(0, 1)[None] for each in drawn(lengths, 4, 2, 16))
    forward = AttentionInterface()[NAME]
    value, segments = value.bfloat16(), Segments.of(lengths, "cpu")
    found, _ = forward(torch.nn.Module(), query, key, value, None, scaling=0.3, segments=segments)
    assert found.dtype == torch.bfloat16 and found.shape == (1, 8, 4, 16)
    rows = [each[0].transpose(0, 1) for each in (query, key, value)]
    expected = dense(*rows, lengths, 0.3)
    torch.testing.assert_close(found[0].float(), expected.float(), atol=0.03, rtol=0.03)
