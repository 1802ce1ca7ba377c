"""The attention backend over 8-bit entries: a batch of rows that decode beside a prompt's chunk.

By vLLM's Triton kernel, interpreted on a CPU, where rows are few, as a GPU runs it.
"""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.configs import vllm_config, write_config
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.int8.layout import scale_bytes, scales_offset
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.all_entries import AllEntries
from vllm_kvx.ops.retrieval.retrieve import Scratch
from vllm_kvx.worker.int8_cache import backend, pieces

BLOCK, BLOCKS, HEADS, KV_HEADS, DIM, SIDECAR = 32, 12, 4, 2, 32, 512
LENS = [40, 70, 33, 100]


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return vllm_config(write_config(tmp_path), "fier-64", dtype="float32", block_size=BLOCK)


def cache() -> Tensor:
    page = scales_offset(KV_HEADS * BLOCK * 2 * DIM, SIDECAR) + scale_bytes(KV_HEADS, BLOCK)
    raw = torch.full((BLOCKS * page,), -1, dtype=torch.int8)
    shape, strides = (BLOCKS, KV_HEADS, BLOCK, 2 * DIM), (page, 2 * DIM, KV_HEADS * 2 * DIM, 1)
    return torch.as_strided(raw, shape, strides)


def by_ops() -> AllEntries:
    scratch = Scratch.of(
        INDEXES["one_bit"], HEADS, KV_HEADS, DIM, 6, 64, 64, 1, "max", torch.device("cpu"), "triton"
    )
    return AllEntries.of(scratch, 160)


@pytest.mark.parametrize(
    ("rows", "short", "together", "pieces_of"),
    [
        ([1, 2, 20, 9], 8, 32, [1, 3]),
        ([1, 1, 20, 9], 1, 32, [1, 3]),
        ([1, 1, 20, 9], 1, 133, [1]),
        ([1, 1, 1, 1], 1, 133, []),
    ],
    ids=["vllm", "ops", "ops, shared", "ops alone"],
)
def test_rows_beside_a_chunk(
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[int],
    short: int,
    together: int,
    pieces_of: list[int],
) -> None:
    """Two requests of few rows are read as stored; one of 20 is undone, and one in slices or both.

    pieces_of: of each chunk.
    """
    monkeypatch.setattr(pieces, "SLICE", 32)
    generator = torch.Generator().manual_seed(0)
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_size=DIM,
        dtype=torch.int8,
        kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
    )
    with set_current_vllm_config(config):
        impl = backend.Int8AttentionImpl(
            HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, "int8_per_token_head"
        )
        builder = backend.Int8MetadataBuilder(spec, [], config, torch.device("cpu"))
    builder.short, builder.together = short, together  # A CPU has all undone.
    impl.sidecar_bytes, impl.all_entries = SIDECAR, by_ops()
    kv_cache, layer = cache(), SimpleNamespace()
    table = torch.randperm(BLOCKS, generator=generator)[: 4 * 4 - 4].int()
    tables = torch.zeros(4, 4, dtype=torch.int32)
    for request, first in enumerate((0, 2, 5, 7)):
        used = -(-LENS[request] // BLOCK)
        tables[request, :used] = table[first : first + used]
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    # What was there before, and then the step's own entries, of which the last is padding.
    every = [torch.randn(n, 2, KV_HEADS, DIM, generator=generator) for n in LENS]
    slots = [
        tables[r, torch.arange(n) // BLOCK].long() * BLOCK + torch.arange(n) % BLOCK
        for r, n in enumerate(LENS)
    ]
    for own in (False, True):
        parts = [
            slice(n - m, n) if own else slice(0, n - m) for n, m in zip(LENS, rows, strict=True)
        ]
        entries = torch.cat([each[part] for each, part in zip(every, parts, strict=True)])
        where = torch.cat([each[part] for each, part in zip(slots, parts, strict=True)])
        entries = torch.cat([entries, torch.full_like(entries[:1], torch.nan)])
        where = torch.cat([where, torch.tensor([-1])])
        impl.do_kv_cache_update(layer, entries[:, 0], entries[:, 1], kv_cache, where)
    metadata = builder.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(LENS, dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.tensor(LENS, dtype=torch.int32),
            num_reqs=4,
            num_actual_tokens=sum(rows),
            max_query_len=max(rows),
            max_seq_len=max(LENS),
            block_table_tensor=tables,
            slot_mapping=where,
        ),
    )
    assert [len(chunk.pieces) for chunk in metadata.undone.chunks] == pieces_of
    query = torch.randn(sum(rows) + 1, HEADS, DIM, generator=generator)
    out = torch.full_like(query, torch.nan)
    # With another block table, as groups of one stage are given.
    moved = builder.update_block_table(metadata, tables.clone(), where)
    for of in (metadata, moved):
        out.fill_(torch.nan)
        impl.forward(layer, query, query, query, kv_cache, of, out)
        expected = torch.cat(
            [
                attended(impl.paged(kv_cache), query[a:b], tables[r], LENS[r])
                for r, (a, b) in enumerate(pairwise(starts.tolist()))
            ]
        )
        assert torch.allclose(out[:-1], expected, atol=1e-5)
        assert out[-1].isnan().all()
    assert impl.forward(layer, query, query, query, kv_cache, None, out).eq(0).all()


def attended(paged: PagedKV, query: Tensor, table: Tensor, length: int) -> Tensor:
    """(m, H, D): causal attention of a request's last rows."""
    share = HEADS // KV_HEADS
    keys = paged.dense_keys(table, length).repeat_interleave(share, 0)
    values = paged.dense_values(table, length).repeat_interleave(share, 0)
    logits = query.transpose(0, 1) @ keys.mT * DIM**-0.5
    first = length - len(query)
    seen = torch.arange(length) <= torch.arange(first, length)[:, None]
    return (logits.masked_fill(~seen, float("-inf")).softmax(-1) @ values).transpose(0, 1)
