"""Caches of more than 2 ** 32 numbers: every op at their very end, against a small cache.

A layer whose KV group has one or two layers may have a cache of a hundred GiB. An offset in it that
was computed in 32 bits would lie elsewhere in it, where the memory of these tests holds zeros.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.ragged import NO_BLOCK, offsets_of, same_bits
from support.retrieved_layers import SCALE, Layer, Rows, Shape, jobs_of, label, pointers
from torch import Tensor

from vllm_kvx.ops.int8.store import store_in_torch, store_in_triton
from vllm_kvx.ops.int8.undo import undo_in_torch, undo_in_triton
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.attention_metrics import window_metrics
from vllm_kvx.ops.prompt.chosen_rows import (
    ChosenRows,
    attend_chosen_kernel,
    attend_chosen_reference,
)
from vllm_kvx.ops.prompt.key_norms import key_scores
from vllm_kvx.ops.prompt.move import copy_blocks, move_entries
from vllm_kvx.ops.prompt.saliency import window_saliency
from vllm_kvx.ops.prompt.value_norms import factors_of, value_norms
from vllm_kvx.ops.retrieval.index_layout import Sidecar
from vllm_kvx.ops.retrieval.retrieve import Scratch, retrieve
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.ops.slots import map_slots

# In numbers of 1, 2 and 4 bytes 81 GiB are 20.25, 10.125 and 5.0625 times 2 ** 32. So an offset of
# the last blocks that lost its upper bits is small and positive: what goes by it reads zeros or
# leaves the last blocks as they are, and no test ends the process.
SIZE = 81 << 30
# What the tests touch, and what the file system may take for it.
_SPARSE = 1 << 28


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tensor]:
    """(SIZE,) uint8, zeros where nothing was written: on a CPU a file that is one hole."""
    if torch.cuda.is_available():
        if torch.cuda.mem_get_info()[0] < SIZE + _SPARSE:
            pytest.skip(f"needs {SIZE >> 30} GiB of GPU memory")
        whole = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
        yield whole
        # The tests that follow in this process need the memory, whoever still has the tensor.
        whole.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        return
    path = tmp_path_factory.mktemp("large") / "cache"
    try:
        mapped = torch.from_file(str(path), shared=True, size=SIZE, dtype=torch.uint8)
        mapped[-1] = 1
        taken = path.stat().st_blocks * 512
    except (OSError, RuntimeError) as error:
        pytest.skip(f"needs a file of {SIZE >> 30} GiB with a hole: {error}")
    finally:
        # What is mapped stays until the tensor goes.
        path.unlink(missing_ok=True)
    if taken > _SPARSE:
        pytest.skip(f"needs a file system with holes: the file takes {taken} bytes")
    yield mapped


def at_the_end(layer: Layer, memory: Tensor) -> Layer:
    """The same blocks as the last ones of a cache that takes all of `memory`."""
    keys, sidecar = layer.paged.keys, layer.sidecar
    page, count = keys.stride(0) * keys.itemsize, len(keys)
    total = SIZE // page
    first = total - count

    def moved(view: Tensor) -> Tensor:
        assert first * view.stride(0) > 1 << 32
        whole = (total, *view.shape[1:])
        return memory.view(view.dtype).as_strided(whole, view.stride(), view.storage_offset())

    def moved_if(view: Tensor | None) -> Tensor | None:
        return None if view is None else moved(view)

    raw = memory[first * page : total * page]
    raw.copy_(layer.raw)
    paged = PagedKV(
        moved(keys),
        moved(layer.paged.values),
        moved_if(layer.paged.key_scales),
        moved_if(layer.paged.value_scales),
    )
    # Without codes there is nothing to move.
    codes = moved(sidecar.codes) if sidecar.codes.numel() else sidecar.codes
    tables = torch.where(layer.tables == NO_BLOCK, layer.tables, layer.tables + first)
    moved_sidecar = Sidecar(sidecar.shape, codes, moved(sidecar.scales))
    return Layer(layer.shape, raw, paged, moved_sidecar, tables)


FLOAT32 = Shape((70, 33), heads=4, kv_heads=2, head_dim=64, layout="cpu")
FLOAT16 = Shape(
    (70, 65), heads=4, kv_heads=2, head_dim=64, block_size=64, layout="nhd", dtype=torch.float16
)
FP8 = replace(FLOAT16, cache_dtype=torch.float8_e4m3fn)
INT8 = replace(FLOAT16, cache_dtype=torch.int8, spare=32)
PAGES = replace(FLOAT16, has_codes=False, layout="hnd")


def randn(seed: int, *shape: int, like: Layer) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).to(like.raw.device, like.shape.dtype)


def ints(values: Any, layer: Layer) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=layer.raw.device)


def ragged(layer: Layer) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Block tables, lengths and offsets of a batch, its longest and all of its keys."""
    lengths = layer.shape.lengths
    num_keys = ints(lengths, layer)
    return layer.tables, num_keys, offsets_of(num_keys), max(lengths), sum(lengths)


def write_index(layer: Layer) -> list[Tensor]:
    shape = layer.shape
    jobs = [(0, f, i) for f, n in enumerate(shape.lengths) for i in range(n // shape.group)]
    writer = shape.index.writer([(layer.paged, layer.sidecar)], [0], [0])
    writer.write(jobs_of(jobs, str(layer.raw.device)), *pointers([layer.tables]))
    return []


def write_index_in_torch(layer: Layer) -> list[Tensor]:
    layer.fill()
    return []


def rows_of(layer: Layer) -> Rows:
    device = str(layer.raw.device)
    return Rows([2, 0], [0, 1], list(layer.shape.lengths), [5, 40], layer.shape.unit, device)


def retrieved(layer: Layer, reduction: str, backend: str) -> list[Tensor]:
    """Scores, the choice among them, and attention."""
    write_index(layer)
    rows = rows_of(layer)
    scratch = scratch_of(layer, rows, reduction, backend)
    out = attended(layer, rows.on_device, scratch)
    assert out[[2, 0]].abs().amax(dim=-1).min() > 0
    return [scratch.scores, scratch.indices, scratch.counts, out]


def attended(layer: Layer, rows: RetrievalRows, scratch: Scratch) -> Tensor:
    query = layer.query(3)
    out = torch.zeros_like(query)
    where = (layer.paged, layer.sidecar, layer.tables, rows)
    retrieve(query, *where, scratch, out, scale=SCALE, key_scale=1.0, value_scale=1.0)
    return out


def scratch_of(layer: Layer, rows: Rows, reduction: str, backend: str) -> Scratch:
    shape = layer.shape
    return Scratch.of(
        shape.index,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        len(rows.lens),
        rows.capacity,
        max(rows.units(row) for row in range(len(rows.lens))),
        shape.unit,
        reduction,
        layer.raw.device,
        backend,
        shape.dtype,
        one_launch=False,
    )


def retrieve_by_kernels(layer: Layer) -> list[Tensor]:
    return retrieved(layer, "max", "triton")


def retrieve_by_softmax(layer: Layer) -> list[Tensor]:
    return retrieved(layer, "softmax", "triton")


def retrieve_in_torch(layer: Layer) -> list[Tensor]:
    if layer.raw.is_cuda:
        pytest.skip("for CPUs")
    return retrieved(layer, "max", "torch")


def saliency(layer: Layer) -> list[Tensor]:
    tables, *sizes = ragged(layer)
    queries = randn(3, 2, 6, layer.shape.heads, layer.shape.head_dim, like=layer)
    num_keys, offsets, longest, total = sizes
    windows = ints([6, 3], layer)
    where = (tables, num_keys, windows)
    scores = window_saliency(queries, layer.paged, *where, offsets, longest, total, SCALE)
    return [scores, window_metrics(queries, layer.paged, *where, longest, SCALE)]


def norms_of_keys(layer: Layer) -> list[Tensor]:
    return [key_scores(layer.paged, *ragged(layer))]


def norms_of_values(layer: Layer) -> list[Tensor]:
    shape = layer.shape
    factors = factors_of(randn(4, shape.heads, 80, shape.head_dim, like=layer)).to(shape.dtype)
    return [value_norms(layer.paged, factors, *ragged(layer))]


def attend_to_chosen(layer: Layer) -> list[Tensor]:
    """All rows of the first prompt see a whole tile of keys, which takes another loop."""
    last = [n - 1 for n in layer.shape.lengths]
    positions = torch.tensor([66, 67, last[0], 9, last[1]], device=layer.raw.device)
    rows = ChosenRows(np.arange(2), np.array([3, 2], dtype=np.int32), positions, layer.tables)
    query = randn(5, len(positions), layer.shape.heads, layer.shape.head_dim, like=layer)
    found = [torch.empty_like(query) for _ in range(2)]
    attend_chosen_kernel(query, layer.paged, rows, found[0], SCALE)
    attend_chosen_reference(query, layer.paged, rows, found[1], SCALE)
    return found


def move(layer: Layer) -> list[Tensor]:
    """Within blocks and from one to another, and into the blocks of the other prompt."""
    heads, longest, offsets = layer.shape.kv_heads, 3, torch.tensor([0, 3, 5])
    sources = ints([[64, 69, 30, 64, 63]] * heads, layer)
    targets = ints([[0, 7, 8, 1, 2]] * heads, layer)
    counts = ints([[3, 2]] * heads, layer)
    where = (sources, targets, counts, offsets.to(layer.raw.device), longest)
    if layer.shape.lengths[1] < 65:
        where = (*where[:2], ints([[3, 0]] * heads, layer), *where[3:])
    move_entries(layer.paged, layer.tables, *where)
    move_entries(layer.paged, layer.tables, *where, layer.tables.flip(0).contiguous())
    return []


def copy_whole_blocks(layer: Layer) -> list[Tensor]:
    blocks = layer.tables[:, :2].long()
    copy_blocks(layer.paged, blocks[0], blocks[1])
    return []


def store(layer: Layer) -> list[Tensor]:
    """Some entries by the kernel, others in torch."""
    size, (first, second) = layer.shape.block_size, layer.tables[:, :2].long()
    for seed, put, block in ((6, store_in_triton, first[1]), (7, store_in_torch, second[0])):
        key, value = randn(seed, 2, 3, layer.shape.kv_heads, layer.shape.head_dim, like=layer)
        slots = block * size + torch.tensor([0, 9, size - 1], device=layer.raw.device)
        put(layer.paged, key, value, slots)
    return []


def undo(layer: Layer) -> list[Tensor]:
    ends = ints([0, 70, 135], layer)
    found = [randn(8, 135, layer.shape.kv_heads, layer.shape.head_dim, like=layer).zero_()]
    found += [torch.zeros_like(found[0]) for _ in range(3)]
    undo_in_triton(layer.paged, layer.tables, 0, ends, 135, *found[:2])
    undo_in_torch(layer.paged, layer.tables, 0, ends, 135, *found[2:])
    return found


Op = Callable[[Layer], list[Tensor]]
OPS: list[tuple[Op, list[Shape]]] = [
    (write_index, [FLOAT32, FLOAT16, FP8, INT8, PAGES]),
    (write_index_in_torch, [FLOAT32, INT8]),
    (retrieve_by_kernels, [FLOAT32, FLOAT16, FP8, INT8, PAGES]),
    (retrieve_by_softmax, [FLOAT32]),
    (retrieve_in_torch, [FLOAT32, INT8]),
    (saliency, [FLOAT32, FLOAT16]),
    (norms_of_keys, [FLOAT32, FLOAT16, FP8]),
    (norms_of_values, [FLOAT32, FLOAT16, FP8]),
    (attend_to_chosen, [FLOAT32, FLOAT16]),
    (move, [FLOAT32, FLOAT16, FP8]),
    (copy_whole_blocks, [FLOAT16, INT8]),
    (store, [INT8]),
    (undo, [INT8]),
]


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        pytest.param(op, shape, id=f"{op.__name__}-{label(shape)}")
        for op, shapes in OPS
        for shape in shapes
    ],
)
def test_the_last_blocks_are_as_those_of_a_small_cache(
    op: Op, shape: Shape, memory: Tensor, device: str
) -> None:
    small = Layer.of(shape, 0, device)
    large = at_the_end(small, memory)
    before = small.raw.clone()
    expected = op(small)
    assert expected or not torch.equal(small.raw, before), "the op does something"
    for ours, right in zip(op(large), expected, strict=True):
        assert same_bits(ours, right)
    assert torch.equal(large.raw, small.raw)


def test_scores_of_many_long_rows(memory: Tensor, device: str) -> None:
    """Rows' scores begin far into a head's, and the last head's beyond 2 ** 31."""
    shape = replace(FLOAT32, heads=3, kv_heads=3)
    layer = Layer.of(shape, 0, device).fill()
    rows = rows_of(layer)
    stride, skipped = 5 << 28, 1 << 32
    found = []
    for far in (False, True):
        scratch, on_device = scratch_of(layer, rows, "max", "triton"), rows.on_device
        if far:
            whole = memory.view(torch.float32).as_strided((3, 2 * skipped), (stride, 1))
            scratch = replace(scratch, scores=whole)
            on_device = replace(on_device, offsets=on_device.offsets + skipped)
        out = attended(layer, on_device, scratch)
        begin = skipped if far else 0
        scores = scratch.scores[:, begin : begin + rows.capacity]
        found.append((scores, scratch.indices, scratch.counts, out))
    for ours, right in zip(*found, strict=True):
        assert same_bits(ours, right)


@pytest.mark.parametrize("on_host", [True, False])
def test_slots_of_blocks_with_large_numbers(on_host: bool, device: str) -> None:
    if on_host and device != "cpu":
        pytest.skip("for CPUs")

    def column(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    size, blocks = 64, (5 << 26, 3 << 25)
    table, positions = column(*blocks)[None], torch.arange(60, 70, device=device)
    slots = torch.zeros(1, 10, dtype=torch.int64, device=device)
    map_slots(
        column(0),
        column(0),
        column(0, dtype=torch.int64),
        column(0, 10),
        positions,
        column(70),
        column(0)[None],
        column(0)[None],
        *pointers([table]),
        column(size),
        slots,
        column(0)[None],
        1,
        on_host,
    )
    expected = [blocks[at // size] * size + at % size for at in range(60, 70)]
    assert slots[0].tolist() == expected and expected[0] > 1 << 32
