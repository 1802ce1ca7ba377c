"""FlashAttention over packed sequences, forward and backward, against the reference of tuning."""

import pytest
import torch

from vllm_kvx.tuning.packed_attention import Segments, attend, attend_reference


@pytest.mark.parametrize("lengths", [(1,), (7, 1, 300, 2, 128), (4096, 129)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (14, 2, 64), (8, 2, 128)])
def test_as_the_reference(lengths, heads, kv_heads, dim):
    rng = torch.Generator().manual_seed(0)
    rows = [
        torch.randn(sum(lengths), count, dim, generator=rng).cuda().bfloat16().requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    wide = [each.detach().float().requires_grad_() for each in rows]
    segments = Segments.of(lengths, "cuda")
    found = attend(*rows, segments, dim**-0.5)
    expected = attend_reference(*wide, segments, dim**-0.5)
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)
    weight = torch.randn(found.shape, generator=rng).cuda()
    mine = torch.autograd.grad((found * weight).sum(), rows)
    theirs = torch.autograd.grad((expected * weight).sum(), wide)
    for one, other in zip(mine, theirs, strict=True):
        # Of a sequence of one row queries and keys have no gradient.
        assert (one.float() - other).norm() < 0.02 * other.norm() + 1e-3
