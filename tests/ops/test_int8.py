"""8-bit entries with scales in the pages' tails: rounding, views, stores and undoing."""

import pytest
import torch
from support.retrieved_layers import ONE_BIT
from torch import Tensor

from vllm_kvx.ops.int8.layout import ALIGNMENT, scale_bytes, scales_offset
from vllm_kvx.ops.int8.numbers import LEAST_SCALE, quantized, undone
from vllm_kvx.ops.int8.store import store_in_torch, store_in_triton
from vllm_kvx.ops.int8.undo import undo_in_torch, undo_in_triton
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.index_layout import PageShape

HEADS, SIZE, DIM, BLOCKS = 3, 32, 64, 5
SIDECAR = ONE_BIT.page_bytes(PageShape(HEADS, SIZE, DIM, SIZE))


def pages(device: str, nhd: bool, sidecar: int = SIDECAR, spare: int = 48) -> tuple[Tensor, Tensor]:
    """Memory, all of its bytes 255, and the cache as vLLM binds it."""
    entries = HEADS * SIZE * 2 * DIM
    page = scales_offset(entries, sidecar) + scale_bytes(HEADS, SIZE) + spare
    raw = torch.full((BLOCKS * page,), -1, dtype=torch.int8, device=device)
    head, token = (2 * DIM, HEADS * 2 * DIM) if nhd else (SIZE * 2 * DIM, 2 * DIM)
    return raw, torch.as_strided(raw, (BLOCKS, HEADS, SIZE, 2 * DIM), (page, head, token, 1))


def random_entries(count: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values (count, G, D), rows of wider tensors, some of them zero or far apart."""
    wide = torch.randn(2, count, HEADS, DIM + 8, device=device)
    wide[:, 1] = 0
    wide[:, 2] *= 1e4
    wide[:, 3] *= 1e-7
    key, value = wide.to(dtype)[..., :DIM]
    return key, value


class TestNumbers:
    def test_the_largest_channel_is_127(self) -> None:
        x = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
        numbers, scales = quantized(x)
        assert numbers.tolist() == [[64, -127, 32, 0], [0, 0, 0, 0]]
        assert scales.tolist() == pytest.approx([2 / 127, LEAST_SCALE])
        assert torch.equal(undone(numbers, scales)[1], torch.zeros(4))

    def test_off_by_half_a_step_at_most(self) -> None:
        x = torch.randn(7, 3, 64, generator=torch.Generator().manual_seed(0))
        numbers, scales = quantized(x)
        assert ((undone(numbers, scales) - x).abs() <= scales[..., None] * 0.5001).all()


class TestPages:
    @pytest.mark.parametrize("sidecar", [0, SIDECAR, SIDECAR + 4])
    @pytest.mark.parametrize("nhd", [False, True])
    def test_scales_lie_behind_the_sidecar(self, nhd: bool, sidecar: int) -> None:
        raw, cache = pages("cpu", nhd, sidecar)
        page, entries = cache.stride(0), HEADS * SIZE * 2 * DIM
        paged = PagedKV.of_int8(cache, DIM, sidecar)
        assert paged.key_scales is not None and paged.value_scales is not None
        assert paged.keys.shape == (BLOCKS, HEADS, SIZE, DIM)
        assert paged.entry_bytes == 2 * DIM + 8
        raw.zero_()
        paged.key_scales.fill_(1.5), paged.value_scales.fill_(-2.5)
        begin = scales_offset(entries, sidecar)
        assert begin % ALIGNMENT == 0 and begin >= entries + sidecar
        for block in raw.view(BLOCKS, page):
            scales = block[begin : begin + HEADS * SIZE * 8].view(torch.float32)
            assert torch.equal(scales, torch.tensor([1.5, -2.5]).repeat(HEADS * SIZE))
            assert not block[:begin].any() and not block[begin + scale_bytes(HEADS, SIZE) :].any()
        one = paged.of_head(2)
        assert one.num_heads == 1 and one.key_scales is not None
        assert one.key_scales.data_ptr() == paged.key_scales[:, 2].data_ptr()

    def test_beside_a_sidecar(self) -> None:
        raw, cache = pages("cpu", False)
        raw.zero_()
        shape = PageShape(HEADS, SIZE, DIM, SIZE)
        sidecar, paged = ONE_BIT.view(cache, shape), PagedKV.of_int8(cache, DIM, SIDECAR)
        sidecar.codes.fill_(-1), sidecar.scales.fill_(-1)
        assert paged.key_scales is not None and paged.value_scales is not None
        assert not paged.keys.any() and not paged.values.any()
        assert not paged.key_scales.any() and not paged.value_scales.any()

    def test_pages_that_do_not_fit(self) -> None:
        _, cache = pages("cpu", False, spare=0)
        PagedKV.of_int8(cache, DIM, SIDECAR)
        with pytest.raises(ValueError, match=f"no room.*give them {cache.stride(0) + 16}"):
            PagedKV.of_int8(cache, DIM, SIDECAR + 16)
        _, cache = pages("cpu", False, spare=8)
        with pytest.raises(ValueError, match="need multiples of 16"):
            PagedKV.of_int8(cache, DIM, SIDECAR)
        with pytest.raises(ValueError, match=r"int8, not torch\.bfloat16"):
            PagedKV.of_int8(torch.zeros(2, HEADS, SIZE, 2 * DIM, dtype=torch.bfloat16), DIM)
        assert PagedKV.of_int8(cache[:1], DIM, SIDECAR).keys.shape[0] == 1


@pytest.mark.parametrize("nhd", [False, True])
class TestStoreAndUndo:
    def test_stores(self, nhd: bool, device: str) -> None:
        """vLLM's kernel against the reference; padding is skipped and nothing else is touched."""
        count = 40
        key, value = random_entries(count + 3, device, torch.float32)
        slots = torch.randperm(BLOCKS * SIZE)[:count].to(device)
        slots[[5, 17, -1]] = -1
        stored = []
        for put in (store_in_torch, store_in_triton):
            raw, cache = pages(device, nhd)
            paged = PagedKV.of_int8(cache, DIM, SIDECAR)
            put(paged, key, value, slots)
            stored.append((raw, paged))
        (_, right), (_, ours) = stored
        for name in ("keys", "values"):
            # A number between two may be rounded to either: a GPU divides less exactly.
            off = getattr(ours, name).int() - getattr(right, name).int()
            assert off.abs().max() <= 1 and (off != 0).float().mean() < 0.01
        for name in ("key_scales", "value_scales"):
            torch.testing.assert_close(getattr(ours, name), getattr(right, name), equal_nan=True)
        used = slots[slots >= 0]
        free = torch.ones(BLOCKS * SIZE, dtype=torch.bool, device=device)
        free[used] = False
        for raw, paged in stored:
            for view in (paged.keys, paged.values):
                assert (view.transpose(1, 2).flatten(0, 1)[free] == -1).all()
            begin, page = scales_offset(HEADS * SIZE * 2 * DIM), cache.stride(0)
            assert (raw.view(BLOCKS, page)[:, begin : begin + SIDECAR] == -1).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_undoes(self, nhd: bool, dtype: torch.dtype, device: str) -> None:
        # The interpreter cuts what it converts to bfloat16 off.
        cut = dtype == torch.bfloat16 and device == "cpu"
        near = dict(rtol=2**-7 if cut else 0.0, atol=0.0)
        count = 3 * SIZE + 9
        key, value = random_entries(count, device, torch.float32)
        table = torch.randperm(BLOCKS)[:4].int().to(device)
        index = torch.arange(count, device=device)
        slots = table[index // SIZE].long() * SIZE + index % SIZE
        _, cache = pages(device, nhd)
        paged = PagedKV.of_int8(cache, DIM, SIDECAR)
        store_in_torch(paged, key, value, slots)
        right = (undone(*quantized(x)).to(dtype) for x in (key, value))
        right_keys, right_values = right
        assert torch.equal(paged.dense_keys(table, count).transpose(0, 1).to(dtype), right_keys)
        assert torch.equal(paged.dense_values(table, count).transpose(0, 1).to(dtype), right_values)
        for copy in (undo_in_torch, undo_in_triton):
            for first, end in ((0, count), (5, 70), (SIZE, 2 * SIZE), (count - 1, count), (7, 7)):
                size = (end - first + 2, HEADS, DIM)
                keys, values = (
                    torch.full(size, torch.nan, dtype=dtype, device=device) for _ in range(2)
                )
                ends = torch.tensor([0, end - first], dtype=torch.int32, device=device)
                copy(paged, table[None], first, ends, end - first, keys, values)
                torch.testing.assert_close(keys[:-2], right_keys[first:end], **near)
                torch.testing.assert_close(values[:-2], right_values[first:end], **near)
                assert keys[-2:].isnan().all() and values[-2:].isnan().all()

    @pytest.mark.parametrize("first", [0, 5])
    def test_undoes_several_requests(self, nhd: bool, first: int, device: str) -> None:
        """One behind the other: some without entries, some of whole tiles, their rows apart."""
        lens = [32, 0, 70, 1, 64, 33, 0]
        _, cache = pages(device, nhd)
        paged = PagedKV.of_int8(cache, DIM, SIDECAR)
        slots = torch.arange(BLOCKS * SIZE, device=device)
        store_in_torch(paged, *random_entries(len(slots), device, torch.float32), slots)
        # A part of a wider table, behind others' rows: an address of no particular multiple.
        wide = torch.stack([torch.randperm(BLOCKS) for _ in range(len(lens) + 1)]).int()
        table = wide.to(device)[1:, :4]
        ends = torch.tensor([0, *lens], device=device).cumsum(0).int()
        size = (sum(lens) + 2, HEADS, DIM)
        for copy in (undo_in_torch, undo_in_triton):
            keys, values = (torch.full(size, torch.nan, device=device) for _ in range(2))
            copy(paged, table, first, ends, sum(lens), keys, values)
            begin = 0
            for row, count in zip(table, lens, strict=True):
                index = torch.arange(first, first + count, device=device)
                assert torch.equal(keys[begin : begin + count], paged.keys_at(row, index))
                assert torch.equal(values[begin : begin + count], paged.values_at(row, index))
                begin += count
            assert keys[-2:].isnan().all() and values[-2:].isnan().all()
