"""Attention metrics from paged keys against float64; under Triton's interpreter on CPU."""

from typing import Any

import pytest
import torch
from support import inside
from support.ragged import Batch, make_batch, make_sinks, poisoned_outputs
from torch import Tensor

from vllm_kvx.equations.pivot import TOP_SHARE, attention_metrics
from vllm_kvx.equations.saliency import window_attention
from vllm_kvx.ops.prompt.attention_metrics import window_metrics, window_metrics_reference
from vllm_kvx.ops.prompt.metrics_scratch import scratch_bytes

SCALE = 0.3


def metrics_of(batch: Batch, key_scale: float = 1.0, **logits: Any) -> Tensor:
    with poisoned_outputs():
        return window_metrics(
            batch.queries,
            batch.paged,
            batch.block_tables,
            batch.num_keys,
            batch.windows,
            batch.max_num_keys,
            SCALE,
            key_scale,
            **logits,
        )


def reference_of(batch: Batch, key_scale: float = 1.0, **logits: Any) -> Tensor:
    return window_metrics_reference(
        batch.queries,
        batch.paged,
        batch.block_tables,
        batch.num_keys,
        batch.windows,
        SCALE,
        key_scale,
        **logits,
    )


def assert_right(batch: Batch, key_scale: float = 1.0, **logits: Any) -> None:
    expected = reference_of(batch, key_scale, **logits).float()
    # A head that looks at one key has next to no entropy, of which fp32 leaves fewer digits.
    found = metrics_of(batch, key_scale, **logits)
    torch.testing.assert_close(found[..., :2], expected[..., :2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[..., 2], expected[..., 2], rtol=1e-5, atol=1e-12)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and splits per request, several tiles per split."""
    inside.tile_keys(monkeypatch, keys=64, splits=3)


CASES: list[dict[str, Any]] = [
    dict(lengths=[400, 1, 16], windows=[2, 1, 16], heads=2, kv_heads=2, head_dim=64),
    dict(lengths=[65, 300], windows=[1, 3], heads=4, kv_heads=2, head_dim=32, layout="nhd"),
    dict(lengths=[513, 8], windows=[3, 8], heads=4, kv_heads=1, head_dim=128, block_size=32),
    dict(lengths=[129, 7], windows=[5, 3], heads=3, kv_heads=1, head_dim=96, layout="layers"),
    dict(lengths=[250, 31], windows=[4, 2], heads=4, kv_heads=2, head_dim=64, layout="cpu",
         block_size=64),
    dict(lengths=[350, 33], windows=[2, 5], heads=4, kv_heads=2, head_dim=128, layout="nhd",
         dtype=torch.bfloat16),
    dict(lengths=[200, 90], windows=[9, 16], heads=2, kv_heads=1, head_dim=64,
         dtype=torch.bfloat16, max_window=24, block_size=32),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['heads']}x{case['head_dim']}")
def test_matches_reference(case: dict[str, Any], device: str) -> None:
    assert_right(make_batch(0, device=device, **case))


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int, device: str) -> None:
    rng = torch.Generator().manual_seed(seed)

    def choose(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=rng))]

    lengths = torch.randint(1, 500, (choose(1, 2, 3),), generator=rng).tolist()
    windows = [min(int(torch.randint(1, 17, (), generator=rng)), n) for n in lengths]
    kv_heads = choose(1, 2)
    batch = make_batch(
        seed,
        lengths,
        windows,
        heads=kv_heads * choose(1, 2, 4) if max(windows) < 8 else 2,
        kv_heads=kv_heads,
        head_dim=choose(32, 64, 128),
        block_size=choose(16, 32),
        layout=choose("hnd", "nhd", "layers", "cpu"),
        dtype=choose(torch.float32, torch.bfloat16),
        device=device,
    )
    assert_right(batch)


def test_reference_is_the_policy(device: str) -> None:
    shape: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=32)
    batch = make_batch(1, [90], [8], device=device, **shape)
    keys = batch.paged.dense_keys(batch.block_tables[0], 90)
    rows = window_attention(batch.queries[0].transpose(0, 1), keys, SCALE)
    expected = torch.stack(attention_metrics(rows))
    torch.testing.assert_close(reference_of(batch)[0].mean(dim=0).cpu(), expected)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_soft_caps_and_sinks(
    soft_cap: float | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of heads in parts, as little scratch wants them: each part takes its own heads' sinks."""
    sizes = inside.bound_metrics_scratch(monkeypatch, 2 * 2 * 96 * 4)
    batch = make_batch(11, [90, 1], [2, 1], heads=4, kv_heads=2, head_dim=32, device=device)
    assert_right(batch, soft_cap=soft_cap, sinks=make_sinks(4, device))
    assert len(sizes) > 1


def test_sinks_that_take_nearly_all(device: str) -> None:
    """The variance of what is left has its digits."""
    batch = make_batch(12, [90], [2], heads=2, kv_heads=1, head_dim=32, device=device)
    sinks = torch.full((2,), 20.0, device=device)
    expected = reference_of(batch, sinks=sinks).float()
    torch.testing.assert_close(metrics_of(batch, sinks=sinks), expected, rtol=1e-4, atol=0)


def test_top_share_is_a_whole_division() -> None:
    numbers = torch.arange(2_000_001, dtype=torch.float64)
    assert torch.equal((TOP_SHARE * numbers).long(), numbers.long() // 10)


def test_window_of_several_turns(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.tile_window_rows(monkeypatch, rows=16)
    shape: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=32)
    assert_right(make_batch(2, [100, 20, 40], [18, 5, 16], device=device, **shape))


def test_rows_of_several_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.tile_metrics(monkeypatch, keys=128)
    shape: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=32)
    assert_right(make_batch(10, [300, 129], [2, 1], device=device, **shape))


def test_more_splits_than_are_merged_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.tile_keys(monkeypatch, keys=16, splits=256)
    shape: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=32)
    assert_right(make_batch(3, [70 * 16], [2], device=device, **shape))


def test_padding_requests(device: str) -> None:
    shape: dict[str, Any] = dict(heads=2, kv_heads=2, head_dim=32)
    batch = make_batch(4, [0, 40, 0], [0, 8, 0], device=device, **shape)
    assert_right(batch)
    assert (metrics_of(batch)[[0, 2]] == 0).all()


def test_float8_keys(device: str) -> None:
    shape: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    cache_dtype = torch.float8_e4m3fn
    batch = make_batch(5, [200, 9], [4, 4], device=device, cache_dtype=cache_dtype, **shape)
    assert_right(batch, key_scale=0.7)


@pytest.mark.parametrize("length", [1, 9, 30, 128, 333])
def test_uniform_attention(length: int, device: str) -> None:
    """Identical keys: no variance at all, and the top tenth is any tenth."""
    window = min(length, 4)
    shape: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=32)
    batch = make_batch(6, [length], [window], device=device, **shape)
    # One channel: the sum over channels may take another order from key to key.
    batch.paged.keys[..., 1:].mul_(0)
    batch.paged.keys[..., 0].mul_(0).add_(0.5)
    entropy, sparsity, variance = metrics_of(batch).unbind(-1)
    visible = torch.arange(length - window + 1, length + 1, device=device).double()
    top = max(1, length // 10)
    mass = (visible.clamp(max=top) / visible).mean().float().expand(1, 2)
    torch.testing.assert_close(entropy, visible.log().mean().float().expand(1, 2))
    torch.testing.assert_close(sparsity, mass)
    assert (variance == 0).all()


def test_large_scores(device: str) -> None:
    """Most of the attention on one key, and so many probabilities of 0 that they are in the top."""
    shape: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=64)
    batch = make_batch(7, [333], [2], device=device, **shape)
    batch.queries.mul_(30)
    batch.paged.keys.mul_(3)
    torch.testing.assert_close(metrics_of(batch), reference_of(batch).float(), rtol=2e-4, atol=1e-6)


def test_batched_is_alone_bit_for_bit(device: str) -> None:
    shape: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=32, max_window=16)
    batch = make_batch(8, [90, 300, 33], [4, 1, 9], device=device, **shape)
    together = metrics_of(batch)
    for f in range(3):
        assert torch.equal(together[f : f + 1], metrics_of(batch.alone(f)))


@pytest.mark.parametrize("heads_at_once", [0, 2, 4, 7])
def test_scratch_is_bounded(
    heads_at_once: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of the batch fits, the bits are those of all at once."""
    shape: dict[str, Any] = dict(heads=6, kv_heads=2, head_dim=32, max_window=32)
    batch = make_batch(9, [60, 70], [1, 2], device=device, **shape)
    together = metrics_of(batch)
    sizes = inside.bound_metrics_scratch(monkeypatch, heads_at_once * 32 * 80 * 4)
    assert torch.equal(metrics_of(batch), together)
    assert sum(sizes) == 2 * 6
    # Two heads of 32 rows make a tile.
    assert max(sizes) <= max(heads_at_once, 2)
    # What vLLM is told to plan for is enough, and tight where a tile alone needs more.
    planned = scratch_bytes(32, num_requests=2, num_kv_heads=2, group=3, max_num_keys=70)
    assert max(sizes) * 32 * 80 * 4 <= planned == max(heads_at_once, 2) * 32 * 80 * 4
