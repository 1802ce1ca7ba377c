"""Pooling against its torch reference; under Triton's interpreter on CPU."""

import pytest
import torch
from support import inside
from support.ragged import offsets_of, poisoned_outputs
from torch import Tensor

from vllm_kvx.ops.prompt.pool import pool_per_kv_head, pool_per_kv_head_reference

UNUSED = 5


def pooled_of(scores: Tensor, kv_heads: int, sizes: tuple[Tensor, ...]) -> Tensor:
    """The kernel's result; checks that it writes its own columns and no others."""
    num_keys, windows, offsets, kernels = sizes
    total = int(offsets[-1])
    padded = torch.full((scores.shape[0], total + UNUSED), float("nan"), device=scores.device)
    padded[:, :total] = scores
    unpooled = torch.full((kv_heads, total + UNUSED), float("nan"), device=scores.device)
    with poisoned_outputs():
        arguments = padded, kv_heads, num_keys, windows, offsets, kernels, int(num_keys.max())
        pooled = pool_per_kv_head(*arguments, unpooled)
        alone = pool_per_kv_head(*arguments)
    assert torch.equal(alone[:, :total], pooled[:, :total])
    ones = torch.ones_like(kernels)
    single = pool_per_kv_head_reference(scores, kv_heads, num_keys, windows, offsets, ones)
    assert torch.equal(unpooled[:, :total], single)
    for each in (pooled, unpooled, alone):
        assert each[:, total:].isnan().all(), "wrote past the batch"
    return pooled[:, :total]


@pytest.mark.parametrize("block", [32, 1024])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (6, 2), (3, 3)])
def test_pooling_matches_reference(
    heads: int, kv_heads: int, block: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.tile_pool(monkeypatch, keys=block)
    lengths, windows, kernels = [100, 9, 8, 1, 0, 70], [8, 6, 8, 1, 0, 1], [7, 13, 7, 1, 3, 1]
    num_keys, window, kernel = (
        torch.tensor(sizes, dtype=torch.int32, device=device)
        for sizes in (lengths, windows, kernels)
    )
    offsets = offsets_of(num_keys)
    rng = torch.Generator(device).manual_seed(0)
    scores = torch.rand(heads, int(offsets[-1]), generator=rng, device=device)
    expected = pool_per_kv_head_reference(scores, kv_heads, num_keys, window, offsets, kernel)
    # A neighbour across the window's edge or of another request would win every maximum.
    for f, length in enumerate(lengths):
        end = int(offsets[f]) + length
        scores[:, end - windows[f] : end] = float("inf")
    pooled = pooled_of(scores, kv_heads, (num_keys, window, offsets, kernel))
    assert torch.equal(pooled, expected)


def test_the_largest_of_the_heads(device: str) -> None:
    """In the place of their sum, pooled and not."""
    num_keys = torch.tensor([60, 13], dtype=torch.int32, device=device)
    sizes = (num_keys, num_keys * 0 + 4, offsets_of(num_keys))
    kernels = torch.tensor([7, 1], dtype=torch.int32, device=device)
    scores = torch.rand(6, 73, generator=torch.Generator().manual_seed(1)).to(device)
    for kv_heads in (1, 2):
        unpooled = torch.empty(kv_heads, 73, device=device)
        pooled = pool_per_kv_head(scores, kv_heads, *sizes, kernels, 60, unpooled, "max")
        for ours, width in ((pooled, kernels), (unpooled, torch.ones_like(kernels))):
            expected = pool_per_kv_head_reference(scores, kv_heads, *sizes, width, "max")
            assert torch.equal(ours, expected)


def test_pooled_heads_are_summed_in_order(device: str) -> None:
    """Sums whose value depends on the order of their terms."""
    scores = torch.tensor([1.0, 2.0**-24, 2.0**-24, 2.0**-24], device=device)[:, None].repeat(1, 3)
    num_keys = torch.tensor([3], dtype=torch.int32, device=device)
    sizes = (num_keys, num_keys * 0, offsets_of(num_keys), num_keys)
    assert (pooled_of(scores, 1, sizes) == 1).all()
    assert (pooled_of(scores.flip(0), 1, sizes) > 1).all()
