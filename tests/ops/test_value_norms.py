"""Norms of projected values against their torch reference; under Triton's interpreter on CPU."""

from typing import Any

import pytest
import torch
from support import inside
from support.ragged import Batch, make_batch, poisoned_outputs
from torch import Tensor

from vllm_kvx.ops.prompt.value_norms import factors_of, value_norms, value_norms_reference

UNUSED = 5
HIDDEN = 100


def weights(seed: int, heads: int, head_dim: int, device: str, hidden: int = HIDDEN) -> Tensor:
    """An output projection by query head, (H, hidden, D), of which no two heads are alike."""
    rng = torch.Generator(device).manual_seed(seed)
    drawn = torch.randn(heads, hidden, head_dim, generator=rng, device=device)
    return drawn * torch.arange(1, heads + 1, device=device)[:, None, None]


def norms_of(batch: Batch, factors: Tensor) -> Tensor:
    """The kernel's norms; checks that it writes its own columns and no others."""
    with poisoned_outputs():
        norms = value_norms(
            batch.paged,
            factors,
            batch.block_tables,
            batch.num_keys,
            batch.offsets,
            batch.max_num_keys,
            batch.total_keys + UNUSED,
        )
    assert norms[:, batch.total_keys :].isnan().all(), "wrote past the batch"
    return norms[:, : batch.total_keys]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles per request, and several of a factor."""
    inside.tile_value_norms(monkeypatch, keys=64, out_bytes=64)


CASES: list[dict[str, Any]] = [
    dict(lengths=[300, 1, 64, 65], heads=2, kv_heads=1, head_dim=64),
    dict(lengths=[63, 129], heads=3, kv_heads=3, head_dim=32, layout="nhd"),
    dict(lengths=[200, 31, 32, 33], heads=6, kv_heads=2, head_dim=128, block_size=32),
    dict(lengths=[100, 7], heads=4, kv_heads=2, head_dim=80, layout="layers"),
    dict(lengths=[250, 128], heads=4, kv_heads=2, head_dim=80, layout="cpu", block_size=64),
    dict(lengths=[90, 17], heads=4, kv_heads=2, head_dim=256),
    dict(lengths=[150, 33], heads=4, kv_heads=2, head_dim=128, layout="nhd", dtype=torch.bfloat16),
    dict(lengths=[90, 16], heads=7, kv_heads=1, head_dim=64, dtype=torch.float16),
    dict(lengths=[90, 17], heads=4, kv_heads=2, head_dim=64, cache_dtype=torch.float8_e4m3fn),
]  # fmt: skip


def make(seed: int, lengths: list[int], device: str, **shape: Any) -> tuple[Batch, Tensor]:
    """A batch whose queries are not read, and the factors of its heads."""
    windows = [min(length, 1) for length in lengths]
    batch = make_batch(seed, lengths, windows, device=device, **shape)
    factors = factors_of(weights(seed, shape["heads"], shape["head_dim"], device))
    return batch, factors.to(batch.queries.dtype)


def assert_right(batch: Batch, factors: Tensor) -> None:
    sizes = (batch.block_tables, batch.num_keys, batch.offsets)
    expected = value_norms_reference(batch.paged, factors, *sizes)
    torch.testing.assert_close(norms_of(batch, factors), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kv_heads']}x{case['head_dim']}")
def test_matches_reference(case: dict[str, Any], small_tiles: None, device: str) -> None:
    assert_right(*make(0, device=device, **case))


def test_one_tile(device: str) -> None:
    assert_right(*make(1, [100, 700, 1], device, heads=4, kv_heads=2, head_dim=32))


def test_padding_requests(device: str) -> None:
    assert_right(*make(2, [0, 40, 0, 9, 0], device, heads=4, kv_heads=2, head_dim=32))
    empty = make(2, [0, 0], device, heads=4, kv_heads=2, head_dim=32)
    assert norms_of(*empty).shape == (2, 0)


def test_batched_is_alone_bit_for_bit(small_tiles: None, device: str) -> None:
    batch, factors = make(3, [150, 300, 33], device, heads=4, kv_heads=2, head_dim=80)
    together = norms_of(batch, factors)
    for f in range(3):
        first, last = batch.offsets[f : f + 2].tolist()
        assert torch.equal(together[:, first:last], norms_of(batch.alone(f), factors))


@pytest.mark.parametrize("hidden", [20, 100])
def test_they_are_norms_of_projected_values(hidden: int, device: str) -> None:
    """With fewer rows than channels, too, which has many values that are projected to nothing."""
    batch, _ = make(4, [70], device, heads=4, kv_heads=2, head_dim=64)
    weight = weights(4, 4, 64, device, hidden)
    values = batch.paged.dense_values(batch.block_tables[0], 70).double()
    by_head = weight.double().unflatten(0, (2, 2))
    projected = values[:, None] @ by_head.transpose(-1, -2)  # (G, H / G, 70, hidden)
    expected = projected.norm(dim=-1).mean(dim=1)
    norms = norms_of(batch, factors_of(weight)).double()
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=1e-5)


def test_factors() -> None:
    """They have the weights' Gram matrices, also of weights that lack rank."""
    for weight in (weights(5, 3, 64, "cpu"), weights(5, 3, 64, "cpu", 20), torch.zeros(2, 90, 32)):
        factors = factors_of(weight).double()
        gram = weight.double().mT @ weight.double()
        torch.testing.assert_close(factors.mT @ factors, gram, rtol=1e-4, atol=1e-3)
