"""Attention to all entries by the operator that attends to chosen ones."""

from dataclasses import replace

import pytest
import torch
from support.retrieved_layers import INT8, SCALE, SHAPES, Layer, Shape, label

from vllm_kvx.ops.retrieval.all_entries import UNIT, AllEntries
from vllm_kvx.ops.retrieval.attend import attend_reference
from vllm_kvx.ops.retrieval.retrieve import Scratch

pytestmark = pytest.mark.usefixtures("bfloat16_in_the_interpreter")
# Of the first request; the others see all of their entries but the last one, which sees none.
LENGTHS = (UNIT, UNIT + 1, 2 * UNIT + 3)


@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("shape", [INT8[0], INT8[1], SHAPES[0]], ids=label)
def test_every_backend(shape: Shape, soft_cap: float | None, device: str) -> None:
    """Rows see what their lengths say, and a row without entries is left as it is."""
    shape = replace(shape, lengths=(*shape.lengths, 40))
    layer, count = Layer.of(shape, 0, device), len(shape.lengths)
    query, share = layer.query(count + 1), shape.heads // shape.kv_heads
    for backend in ("torch", "triton"):
        scratch = Scratch.of(
            shape.index,
            num_heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_rows=count + 2,
            capacity=64,
            max_units=2,
            unit=shape.unit,
            reduction="max",
            device=torch.device(device),
            backend=backend,
        )
        every = AllEntries.of(scratch, max_len=max(shape.lengths) + 5)
        # As vLLM's sleep saves and restores them.
        assert [kept.copy_(kept.clone()).dim() for kept in every.kept] == [1, 1]
        indices = every.scratch.indices
        assert indices.untyped_storage().nbytes() == indices.shape[2] * indices.itemsize
        for first in LENGTHS:
            host = [min(first, shape.lengths[0]), *shape.lengths[1:-1], 0]
            lens = torch.tensor(host, dtype=torch.int32, device=device)
            out = torch.full_like(query, float("nan"))
            where = (query, layer.paged, layer.tables, lens, out)
            every.attend(*where, scale=SCALE, soft_cap=soft_cap)
            for r, length in enumerate(host[:-1]):
                index = torch.arange(length, device=device)
                for g in range(shape.kv_heads):
                    heads, one = slice(g * share, (g + 1) * share), layer.paged.of_head(g)
                    expected = attend_reference(
                        *(query[r, heads], one, layer.tables[r], index, SCALE), soft_cap=soft_cap
                    )
                    near = dict(rtol=1e-4, atol=1e-5)
                    if shape.dtype != torch.float32:
                        near = dict(rtol=2e-2, atol=2e-2)
                    torch.testing.assert_close(out[r, heads].float(), expected, **near)
            assert out[count - 1 :].isnan().all()
