"""Random layers, scores and selections for retrieval's CUDA ops; how an op is run and checked."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.ragged import NO_BLOCK
from torch import Tensor

from vllm_kvx.equations.retrieval import num_full_groups, page_scores, reduce_heads, token_scores
from vllm_kvx.equations.softmax import capped, softmax
from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.int8.layout import scale_bytes, scales_offset
from vllm_kvx.ops.int8.numbers import quantized
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval import cuda as cuda_ops
from vllm_kvx.ops.retrieval.index_layout import PageShape, Sidecar
from vllm_kvx.ops.retrieval.rows import RetrievalRows

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
POISON = -7


@dataclass(frozen=True)
class Case:
    """R rows over a cache in which whatever must not be read is NaN."""

    q: Tensor
    paged: PagedKV
    sidecar: Sidecar
    block_table: Tensor
    tokens: Tensor
    requests: Tensor
    lens: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.block_table, self.tokens, self.requests, self.lens

    @property
    def num_kv_heads(self) -> int:
        return self.paged.num_heads

    def table(self, row: int) -> Tensor:
        return self.block_table[int(self.requests[row])]

    def query(self, row: int) -> Tensor:
        return self.q[int(self.tokens[row])]


def make_case(
    lens: Sequence[int],
    *,
    kv_heads: int = 2,
    share: int = 4,
    head_dim: int = 128,
    group: int = 32,
    block_size: int = 32,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    has_codes: bool = True,
    nhd: bool = False,
    q_scale: float = 1.0,
    seed: int = 0,
    first_byte: int = 0,
) -> Case:
    """first_byte: all blocks that are read lie behind so many bytes of the layer's cache."""
    torch.manual_seed(seed)
    random.seed(seed)
    cache_dtype = cache_dtype or dtype
    blocks = [-(-n // block_size) for n in lens]
    total, rows = sum(blocks) + 3, len(lens)
    kept = INDEXES["one_bit" if has_codes else "page_bounds"]
    layout = PageShape(kv_heads, block_size, head_dim, group)
    page = kv_heads * block_size * 2 * head_dim
    itemsize, sidecar_bytes = cache_dtype.itemsize, kept.page_bytes(layout)
    stride = page + sidecar_bytes // itemsize
    if cache_dtype == INT8:
        stride = scales_offset(page, sidecar_bytes) + scale_bytes(kv_heads, block_size)
    first = -(-first_byte // (stride * itemsize))
    total += first
    memory = torch.full((total, stride * itemsize), 255, dtype=torch.uint8, device="cuda")
    strides = (block_size * 2 * head_dim, 2 * head_dim)
    head_stride, slot_stride = (2 * head_dim, kv_heads * 2 * head_dim) if nhd else strides
    cache = memory.view(cache_dtype).as_strided(
        (total, kv_heads, block_size, 2 * head_dim), (stride, head_stride, slot_stride, 1)
    )
    paged, sidecar = PagedKV.of(cache, head_dim), kept.view(cache, layout)
    if cache_dtype == INT8:
        paged = PagedKV.of_int8(cache, head_dim, sidecar_bytes)

    order = (first + torch.randperm(total - first)).tolist()
    table = torch.full((rows + 1, max([*blocks, 1]) + 2), NO_BLOCK, dtype=torch.int32)
    requests = torch.randperm(rows + 1)[:rows].int()
    for row, (length, count) in enumerate(zip(lens, blocks, strict=True)):
        mine = [order.pop() for _ in range(count)]
        table[requests[row], :count] = torch.tensor(mine, dtype=torch.int32)
        if not length:
            continue
        entry, at = torch.arange(length), torch.tensor(mine)
        block, slot = at[entry // block_size].cuda(), (entry % block_size).cuda()
        data = torch.randn(length, kv_heads, 2 * head_dim, device="cuda")
        if paged.key_scales is not None and paged.value_scales is not None:
            places, (key, value) = (block, slice(None), slot), data.chunk(2, dim=-1)
            paged.keys[places], paged.key_scales[places] = quantized(key)
            paged.values[places], paged.value_scales[places] = quantized(value)
        else:
            stored = data.to(cache_dtype).view(torch.uint8)
            cache.view(torch.uint8)[block, :, slot] = stored
        index = torch.arange(num_full_groups(length, group))
        per_block = block_size // group
        block, at_group = at[index // per_block].cuda(), (index % per_block).cuda()
        scales = torch.randn(len(index), kv_heads, 2, head_dim, device="cuda")
        scales[:, :, 0].abs_()
        sidecar.scales[block, :, at_group] = scales.half()
        if has_codes:
            entry = torch.arange(len(index) * group)
            block, slot = at[entry // block_size].cuda(), (entry % block_size).cuda()
            shape = (len(entry), kv_heads, head_dim // 32)
            words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device="cuda")
            sidecar.codes[block, :, slot] = words.int()
    q = torch.randn(rows + 2, kv_heads * share, head_dim, device="cuda") * q_scale
    return Case(
        q.to(dtype),
        paged,
        sidecar,
        table.cuda(),
        torch.randperm(rows + 2)[:rows].int().cuda(),
        requests.cuda(),
        torch.tensor(lens, dtype=torch.int32, device="cuda"),
    )


@dataclass(frozen=True)
class Scores:
    """Poisoned outputs of the score operators, with room around each row's."""

    units: list[int]
    offsets: Tensor
    values: Tensor
    histogram: Tensor

    @classmethod
    def of(cls, units: list[int], kv_heads: int) -> "Scores":
        starts = torch.tensor([0, *units]).cumsum(0)[:-1] + 3
        values = torch.full((kv_heads, sum(units) + 5), float("nan"), device="cuda")
        histogram = torch.zeros(len(units), kv_heads, 2048, dtype=torch.int32, device="cuda")
        return cls(units, starts.cuda(), values, histogram)

    def row(self, row: int) -> Tensor:
        start = int(self.offsets[row])
        return self.values[:, start : start + self.units[row]]

    def count(self) -> None:
        """Fills the histogram as the score operators do."""
        for row in range(len(self.units)):
            for head, scores in enumerate(self.row(row)):
                self.histogram[row, head] = bins_of(scores)


def bins_of(scores: Tensor) -> Tensor:
    bits = (scores + 0.0).view(torch.int32).long() & 0xFFFFFFFF
    keys = torch.where(bits >= 2**31, 0xFFFFFFFF - bits, bits + 2**31)
    return torch.bincount(keys >> 21, minlength=2048).int()


TOLERANCE = 2e-5


def check_scores(
    case: Case, scores: Scores, reduction: str, pages: bool, tolerance: float = TOLERANCE
) -> None:
    group = case.sidecar.shape.group
    written = torch.zeros_like(scores.values, dtype=torch.bool)
    for row, length in enumerate(case.lens.tolist()):
        got, start = scores.row(row), int(scores.offsets[row])
        written[:, start : start + got.shape[1]] = True
        if not length:
            assert not scores.histogram[row].any()
            continue
        full = num_full_groups(length, group)
        signs, scales, zeros = case.sidecar.dense(case.table(row), full)
        query = case.query(row)
        if pages:
            expected = page_scores(query, scales, zeros)
        else:
            assert signs is not None
            expected = token_scores(query, signs, scales, zeros)
        expected = reduce_heads(expected, case.num_kv_heads, reduction, 1.0)
        known = expected.shape[1]
        if known:
            assert (got[:, :known] - expected).abs().max() <= tolerance * expected.abs().max()
        assert (got[:, known:] == float("inf")).all()
        for head in range(case.num_kv_heads):
            assert torch.equal(scores.histogram[row, head], bins_of(got[head]))
    assert scores.values[~written].isnan().all()


LENGTHS = [1000, 0, 33, 32, 1, 129, 4099]


def run_score(case: Case, scores: Scores, reduction: str, programs: int) -> None:
    cuda_ops.score(
        case.q,
        case.sidecar.codes,
        case.sidecar.scales,
        *case.rows,
        scores.offsets,
        scores.values,
        scores.histogram,
        case.sidecar.shape.group,
        cuda_ops.REDUCTIONS[reduction],
        programs,
    )


def rows_of(
    lens: Tensor, budgets: list[int], scores: Scores, case: Case | None = None
) -> RetrievalRows:
    unused = torch.zeros_like(lens)
    tokens, requests = (case.tokens, case.requests) if case else (unused, unused)
    at_most = torch.tensor(budgets, dtype=torch.int32, device="cuda")
    return RetrievalRows(tokens, requests, lens, at_most, scores.offsets)


def outputs(rows: int, kv_heads: int, units: int) -> tuple[Tensor, Tensor]:
    indices = torch.full((rows, kv_heads, units), POISON, dtype=torch.int32, device="cuda")
    return indices, indices[..., 0].clone()


def check_selected(scores: Scores, budgets: list[int], indices: Tensor, counts: Tensor) -> None:
    assert not scores.histogram.any()
    for row, (units, budget) in enumerate(zip(scores.units, budgets, strict=True)):
        count = min(units, budget)
        assert (counts[row] == count).all()
        best = (scores.row(row) + 0.0).sort(dim=1, descending=True, stable=True).indices
        expected = best[:, :count].sort(dim=1).values
        assert torch.equal(indices[row, :, :count].long(), expected)
        assert (indices[row, :, count:] == POISON).all()


@dataclass(frozen=True)
class Attention:
    """Outputs and scratch of ``attend``, poisoned but for the tickets."""

    partial_out: Tensor
    partial_lse: Tensor
    tickets: Tensor
    out: Tensor

    @classmethod
    def of(cls, case: Case, splits: int) -> "Attention":
        rows, (_, heads, dim) = len(case.lens), case.q.shape
        partial = torch.full((rows, heads, splits, dim), float("nan"), device="cuda")
        tickets = torch.zeros(rows, case.num_kv_heads, dtype=torch.int32, device="cuda")
        out = torch.full_like(case.q, float("nan"))
        return cls(partial, partial[..., 0].clone(), tickets, out)


KEY_SCALE, VALUE_SCALE = 0.7, 1.3


def run_attend(
    case: Case,
    indices: Tensor,
    counts: Tensor,
    unit: int,
    splits: int,
    to: Attention,
    overlap: bool = False,
    programs: int = 1 << 20,
    **logits: Any,
) -> None:
    cuda_ops.attend(
        case.q,
        case.paged.keys,
        case.paged.values,
        *case.rows,
        indices,
        counts,
        to.partial_out,
        to.partial_lse,
        to.tickets,
        to.out,
        case.q.shape[2] ** -0.5,
        KEY_SCALE,
        VALUE_SCALE,
        unit,
        splits,
        programs,
        overlap,
        key_scales=case.paged.key_scales,
        value_scales=case.paged.value_scales,
        **logits,
    )


def check_attention(
    case: Case,
    indices: Tensor,
    counts: Tensor,
    unit: int,
    got: Attention,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    share = case.q.shape[1] // case.num_kv_heads
    assert not got.tickets.any()
    untouched = torch.ones(case.q.shape[0], dtype=torch.bool, device="cuda")
    for row, length in enumerate(case.lens.tolist()):
        if not length:
            continue
        untouched[int(case.tokens[row])] = False
        out = got.out[int(case.tokens[row])].unflatten(0, (-1, share)).float()
        query = case.query(row).unflatten(0, (-1, share)).float()
        for head in range(case.num_kv_heads):
            units = indices[row, head, : int(counts[row, head])].long()
            entry = (units[:, None] * unit + torch.arange(unit, device="cuda")).flatten()
            entry = entry[entry < length]
            one, table = case.paged.of_head(head), case.table(row)
            keys = one.keys_at(table, entry)[:, 0].float() * KEY_SCALE
            values = one.values_at(table, entry)[:, 0].float() * VALUE_SCALE
            products = query[head] @ keys.T * case.q.shape[2] ** -0.5
            mine = None if sinks is None else sinks[head * share : (head + 1) * share]
            expected = softmax(capped(products, soft_cap), mine) @ values
            worst, rounding = (2e-2, 2.0**-8) if case.q.dtype == BF16 else (3e-3, 2.0**-11)
            # Of one large value the weight and the result are both rounded.
            assert ((out[head] - expected).abs() < worst + rounding * expected.abs()).all()
    assert got.out[untouched].isnan().all()


def any_units(case: Case, unit: int) -> tuple[Tensor, Tensor]:
    """Indices and counts of units chosen at random, the newest one among them."""
    most = 1500 // unit
    indices, counts = outputs(len(LENGTHS), case.num_kv_heads, most)
    for row, length in enumerate(LENGTHS):
        units = -(-length // unit)
        for head in range(case.num_kv_heads):
            count = min(random.randint(1, most), units)
            chosen = torch.randperm(max(units - 1, 0))[: max(count - 1, 0)].sort().values
            chosen = torch.cat([chosen, torch.arange(units)[-1:]])
            indices[row, head, : len(chosen)] = chosen.int().cuda()
            counts[row, head] = len(chosen)
    return indices, counts
