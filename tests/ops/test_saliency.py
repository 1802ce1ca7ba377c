"""Saliency kernels against their torch references; under Triton's interpreter on CPU."""

from typing import Any

import pytest
import torch
from support import inside
from support.ragged import Batch, make_batch, make_sinks, poisoned_outputs
from torch import Tensor

from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.saliency import window_saliency, window_saliency_reference

UNUSED = 5
SCALE = 0.3


def scores_of(
    batch: Batch, key_scale: float = 1.0, reduction: str = "sum", **logits: Any
) -> Tensor:
    """The kernel's scores; checks that it writes its own columns and no others."""
    with poisoned_outputs():
        scores = window_saliency(
            batch.queries,
            batch.paged,
            batch.block_tables,
            batch.num_keys,
            batch.windows,
            batch.offsets,
            batch.max_num_keys,
            batch.total_keys + UNUSED,
            SCALE,
            key_scale,
            reduction,
            **logits,
        )
    assert scores[:, batch.total_keys :].isnan().all(), "wrote past the batch"
    return scores[:, : batch.total_keys]


def assert_right(
    batch: Batch, key_scale: float = 1.0, reduction: str = "sum", **logits: Any
) -> None:
    expected = window_saliency_reference(
        batch.queries,
        batch.paged,
        batch.block_tables,
        batch.num_keys,
        batch.windows,
        batch.offsets,
        SCALE,
        key_scale,
        reduction,
        **logits,
    )
    ours = scores_of(batch, key_scale, reduction, **logits)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and splits per request, several tiles per split."""
    inside.tile_keys(monkeypatch, keys=64, splits=3)


CASES: list[dict[str, Any]] = [
    dict(lengths=[700, 1, 64], windows=[8, 1, 64], heads=4, kv_heads=1, head_dim=64),
    dict(lengths=[65, 300], windows=[1, 40], heads=8, kv_heads=1, head_dim=32, layout="nhd"),
    dict(lengths=[513, 8], windows=[5, 8], heads=2, kv_heads=2, head_dim=128, block_size=32),
    dict(lengths=[400, 7], windows=[16, 3], heads=6, kv_heads=2, head_dim=96, layout="layers"),
    dict(lengths=[450, 31], windows=[8, 2], heads=4, kv_heads=2, head_dim=64, layout="cpu",
         block_size=64),
    dict(lengths=[350, 33], windows=[8, 7], heads=8, kv_heads=2, head_dim=128, layout="nhd",
         dtype=torch.bfloat16),
    dict(lengths=[200, 90], windows=[40, 9], heads=7, kv_heads=1, head_dim=64,
         dtype=torch.bfloat16, max_window=64),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['heads']}x{case['head_dim']}")
def test_matches_reference(case: dict[str, Any], small_tiles: None, device: str) -> None:
    assert_right(make_batch(0, device=device, **case))


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int, device: str) -> None:
    rng = torch.Generator().manual_seed(seed)

    def choose(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=rng))]

    count = choose(1, 2, 4)
    lengths = torch.randint(1, 700, (count,), generator=rng).tolist()
    windows = [min(int(torch.randint(1, 41, (), generator=rng)), n) for n in lengths]
    kv_heads = choose(1, 2)
    batch = make_batch(
        seed,
        lengths,
        windows,
        heads=kv_heads * choose(1, 2, 4, 8),
        kv_heads=kv_heads,
        head_dim=choose(32, 64, 128),
        max_window=40,
        block_size=choose(16, 32, 64),
        layout=choose("hnd", "nhd", "layers", "cpu"),
        dtype=choose(torch.float32, torch.bfloat16),
        device=device,
    )
    assert_right(batch)


@pytest.mark.parametrize(
    ("soft_cap", "sink_dtype"), [(None, torch.float32), (2.0, None), (2.0, torch.bfloat16)], ids=str
)
def test_soft_caps_and_sinks(
    soft_cap: float | None, sink_dtype: torch.dtype | None, small_tiles: None, device: str
) -> None:
    """Heads in several tiles, one of which is not full; a window in several turns."""
    shape: dict[str, Any] = dict(heads=6, kv_heads=2, head_dim=32)
    batch = make_batch(7, [150, 5], [70, 5], device=device, **shape)
    sinks = None if sink_dtype is None else make_sinks(6, device, sink_dtype)
    reduction = "sum" if soft_cap is None else "max"
    assert_right(batch, 0.7, reduction, soft_cap=soft_cap, sinks=sinks)


def test_reference_caps_and_sinks_as_written_out(device: str) -> None:
    """Of one window row, number by number."""
    batch = make_batch(8, [40], [1], heads=2, kv_heads=1, head_dim=32, device=device)
    sinks, cap = make_sinks(2, device), 1.5
    scores = scores_of(batch, soft_cap=cap, sinks=sinks).double()
    keys = batch.paged.dense_keys(batch.block_tables[0], 40)[0].double()
    for head in range(2):
        products = keys @ batch.queries[0, 0, head].double() * SCALE
        weights = (cap * torch.tanh(products / cap)).exp()
        expected = weights / (weights.sum() + sinks[head].double().exp())
        torch.testing.assert_close(scores[head, :39], expected[:39], rtol=1e-5, atol=1e-7)


def test_cap_far_above_the_logits_changes_nothing(device: str) -> None:
    batch = make_batch(9, [90], [8], heads=2, kv_heads=2, head_dim=32, device=device)
    far = scores_of(batch, soft_cap=1e4, sinks=torch.full((2,), -80.0, device=device))
    # The cap's tanh leaves 1e4 times the last bit of 1.
    torch.testing.assert_close(far, scores_of(batch), rtol=5e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_logits_far_above_their_cap(device: str) -> None:
    """They are the cap, without an overflow."""
    batch = make_batch(10, [90], [8], heads=2, kv_heads=2, head_dim=32, device=device)
    batch.queries.mul_(1e6)
    assert_right(batch, soft_cap=5.0)


def test_more_splits_than_are_merged_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.tile_keys(monkeypatch, keys=16, splits=256)
    shape: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=32)
    assert_right(make_batch(6, [70 * 16], [8], device=device, **shape))


def test_window_of_several_turns(device: str) -> None:
    shape: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=32)
    assert_right(make_batch(1, [300, 70, 129], [150, 64, 129], device=device, **shape))


def test_padding_requests(device: str) -> None:
    shape: dict[str, Any] = dict(heads=2, kv_heads=2, head_dim=32)
    assert_right(make_batch(2, [0, 40, 0], [0, 8, 0], device=device, **shape))


def test_float8_keys(device: str) -> None:
    shape: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    cache_dtype = torch.float8_e4m3fn
    batch = make_batch(3, [200, 9], [8, 8], device=device, cache_dtype=cache_dtype, **shape)
    assert_right(batch, key_scale=0.7)


def test_large_scores_keep_their_row_sums(device: str) -> None:
    """Softmax rows of scores in the hundreds: most of the attention on one key, the sum still 1."""
    shape: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=64)
    batch = make_batch(4, [333], [1], device=device, **shape)
    batch.queries.mul_(30)
    batch.paged.keys.mul_(3)
    expected = window_saliency_reference(
        batch.queries,
        batch.paged,
        batch.block_tables,
        batch.num_keys,
        batch.windows,
        batch.offsets,
        SCALE,
    )
    torch.testing.assert_close(scores_of(batch), expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [64, 8])
def test_largest_weights(
    small_tiles: None, rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of sums; of a window in one turn and in several."""
    inside.tile_window_rows(monkeypatch, rows=rows)
    shape: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=32)
    batch = make_batch(6, [300, 21, 64], [20, 21, 5], device=device, **shape)
    assert_right(batch, reduction="max")


def test_batched_is_alone_bit_for_bit(small_tiles: None, device: str) -> None:
    shape: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=32, max_window=16)
    batch = make_batch(5, [150, 700, 33], [8, 3, 16], device=device, **shape)
    together = scores_of(batch)
    for f in range(3):
        first, last = batch.offsets[f : f + 2].tolist()
        assert torch.equal(together[:, first:last], scores_of(batch.alone(f)))


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("block_size", [32, 96])
def test_cpu_layout_is_that_of_vllm(isa: str, block_size: int) -> None:
    """Keys and values written by vLLM's own CPU operator are found where the views say."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("needs vLLM's CPU build")
    num_blocks, heads, head_dim = 3, 2, 64
    cache = torch.full((num_blocks, heads, block_size, 2 * head_dim), float("nan"))
    key_cache, value_cache = cache.view(num_blocks, heads, 2 * block_size, -1).chunk(2, dim=2)
    keys, values = torch.randn(2, num_blocks * block_size, heads, head_dim)
    slots = torch.randperm(num_blocks * block_size)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)

    paged = PagedKV.of(cache, head_dim, cpu_isa=isa)
    block, entry = slots // block_size, slots % block_size
    assert torch.equal(paged.keys[block, :, entry], keys)
    assert torch.equal(paged.values[block, :, entry], values)
    assert paged.block_size == block_size and paged.head_dim == head_dim
    table = torch.tensor([2, 0], dtype=torch.int32)
    position = torch.empty_like(slots)
    position[slots] = torch.arange(len(slots))
    first = position[torch.cat([torch.arange(2 * block_size, 3 * block_size), torch.arange(9)])]
    dense_keys = paged.dense_keys(table, block_size + 9)
    assert torch.equal(dense_keys, keys[first].transpose(0, 1))


def test_caches_that_cannot_be_addressed() -> None:
    cache = torch.zeros(1, 1, 32, 128)
    with pytest.raises(ValueError, match="width 128"):
        PagedKV.of(cache, 32)
    with pytest.raises(ValueError, match="'amx'"):
        PagedKV.of(cache, 64, cpu_isa="amx")
