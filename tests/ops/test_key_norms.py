"""Scores by key norm against their torch reference; under Triton's interpreter on CPU."""

from typing import Any

import pytest
import torch
from support import inside
from support.ragged import Batch, make_batch, offsets_of, poisoned_outputs
from torch import Tensor

from vllm_kvx.ops.prompt.key_norms import key_scores, key_scores_reference
from vllm_kvx.ops.prompt.select import select_kept

UNUSED = 5
LARGEST = torch.finfo(torch.float32).max


def scores_of(batch: Batch) -> Tensor:
    """The kernel's scores; checks that it writes its own columns and no others."""
    with poisoned_outputs():
        scores = key_scores(
            batch.paged,
            batch.block_tables,
            batch.num_keys,
            batch.offsets,
            batch.max_num_keys,
            batch.total_keys + UNUSED,
        )
    assert scores[:, batch.total_keys :].isnan().all(), "wrote past the batch"
    return scores[:, : batch.total_keys]


def assert_right(batch: Batch) -> None:
    """The same up to the order of a norm's sum, of which each ulp is one of the score."""
    sizes = (batch.block_tables, batch.num_keys, batch.offsets)
    expected = key_scores_reference(batch.paged, *sizes)
    scores = scores_of(batch)
    assert (scores >= 0).all() and scores.isfinite().all()
    ulps = scores.view(torch.int32) - expected.view(torch.int32)
    assert ulps.abs().max() <= 16, ulps.abs().max()


def norms_of(batch: Batch, request: int) -> Tensor:
    """Squared norms in float64, (G, keys)."""
    length = int(batch.num_keys[request])
    return batch.paged.dense_keys(batch.block_tables[request], length).double().square().sum(-1)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles per request."""
    inside.tile_norms(monkeypatch, keys=64)


CASES: list[dict[str, Any]] = [
    dict(lengths=[300, 1, 64, 65], kv_heads=1, head_dim=64),
    dict(lengths=[63, 129], kv_heads=3, head_dim=32, layout="nhd"),
    dict(lengths=[200, 31, 32, 33], kv_heads=2, head_dim=128, block_size=32),
    dict(lengths=[100, 7], kv_heads=2, head_dim=80, layout="layers"),
    dict(lengths=[250, 128], kv_heads=2, head_dim=80, layout="cpu", block_size=64),
    dict(lengths=[150, 33], kv_heads=2, head_dim=128, layout="nhd", cache_dtype=torch.bfloat16),
    dict(lengths=[90, 16], kv_heads=1, head_dim=64, cache_dtype=torch.float16),
    dict(lengths=[90, 17], kv_heads=2, head_dim=64, cache_dtype=torch.float8_e4m3fn),
]  # fmt: skip


def make(seed: int, lengths: list[int], device: str, **shape: Any) -> Batch:
    """A batch whose queries are not read."""
    windows = [min(length, 1) for length in lengths]
    shape = {"heads": shape["kv_heads"], **shape}
    return make_batch(seed, lengths, windows, device=device, **shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kv_heads']}x{case['head_dim']}")
def test_matches_reference(case: dict[str, Any], small_tiles: None, device: str) -> None:
    assert_right(make(0, device=device, **case))


def test_one_tile(device: str) -> None:
    assert_right(make(1, [100, 700, 1], device, kv_heads=2, head_dim=32))


def test_padding_requests(device: str) -> None:
    assert_right(make(2, [0, 40, 0, 9, 0], device, kv_heads=2, head_dim=32))
    empty = make(2, [0, 0], device, kv_heads=2, head_dim=32)
    assert scores_of(empty).shape == (2, 0)


def test_batched_is_alone_bit_for_bit(small_tiles: None, device: str) -> None:
    batch = make(3, [150, 300, 33], device, kv_heads=2, head_dim=80)
    together = scores_of(batch)
    for f in range(3):
        first, last = batch.offsets[f : f + 2].tolist()
        assert torch.equal(together[:, first:last], scores_of(batch.alone(f)))


def one_channel(values: list[float], device: str) -> Batch:
    """Keys with one channel of these values, the other channels 0."""
    batch = make(4, [len(values)], device, kv_heads=1, head_dim=32)
    index = torch.arange(len(values), device=device)
    block, entry = batch.block_tables[0, index // 16].long(), index % 16
    batch.paged.keys[block, :, entry] = 0.0
    batch.paged.keys[block, 0, entry, 7] = torch.tensor(values, device=device)
    return batch


def test_smaller_norms_score_higher(device: str) -> None:
    """Whatever the norms' size: neighbouring floats, none at all, and what is no finite number."""
    one = torch.tensor(1.0)
    nearly = float(torch.nextafter(torch.nextafter(one, 2 * one), 2 * one))
    values = [0.0, 1e-19, 1e-10, 1.0, nearly, -3.0, 1e10, 1.8e19, 1e20, float("nan"), -float("nan")]
    values += [float("inf"), -float("inf")]
    scores = scores_of(one_channel(values, device))[0]
    assert scores[0] == LARGEST
    assert (scores[:8].diff() < 0).all() and scores[7] > 0
    assert (scores[8:] == 0).all()
    assert (scores.view(torch.int32) >= 0).all()
    bits = torch.tensor(values[:8], device=device).square().view(torch.int32)
    assert torch.equal(scores[:8].view(torch.int32), 0x7F7FFFFF - bits)


def test_the_keys_that_are_selected_have_the_smallest_norms(device: str) -> None:
    batch = make(5, [200, 90], device, kv_heads=2, head_dim=64)
    caps = torch.tensor([30, 20], dtype=torch.int32, device=device)
    out_offsets = offsets_of(caps)
    windows = torch.zeros_like(caps)
    sizes = (batch.num_keys, windows, caps, batch.offsets, out_offsets, int(out_offsets[-1]))
    kept = select_kept(scores_of(batch), *sizes).long()
    for f in range(2):
        first, last = out_offsets[f : f + 2].tolist()
        smallest = norms_of(batch, f).topk(last - first, largest=False).indices.sort().values
        assert torch.equal(kept[:, first:last], smallest)
