"""The index beside the keys, written against its reference; interpreted on CPU."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.retrieved_layers import (
    FP8,
    INT8,
    ONE_BIT,
    PAGE_BOUNDS,
    SHAPES,
    Layer,
    Shape,
    jobs_of,
    label,
    pointers,
)
from torch import Tensor

from vllm_kvx.equations.retrieval import quantize_keys
from vllm_kvx.ops.retrieval.index_layout import PageShape, channel_bits

pytestmark = pytest.mark.usefixtures("bfloat16_in_the_interpreter")


class TestSidecar:
    @pytest.mark.parametrize("shape", [*SHAPES, FP8, *INT8], ids=label)
    def test_writes_full_groups_and_nothing_else(self, shape: Shape, device: str) -> None:
        layer = Layer.of(shape, 0, device)
        expected = Layer.of(shape, 0, device)
        jobs = []
        for f, length in enumerate(shape.lengths):
            # All but the first group of the first request.
            begin, end = min(1, length // shape.group) * (f == 0), length // shape.group
            jobs += [(0, f, group) for group in range(begin, end)]
            shape.index.write_in_torch(
                expected.paged, expected.sidecar, layer.tables[f], begin, end
            )
        writer = shape.index.writer([(layer.paged, layer.sidecar)], [0], [0])
        writer.write(jobs_of(jobs, device), *pointers([layer.tables]))
        assert torch.equal(layer.raw, expected.raw)
        layer.fill()
        for f, length in enumerate(shape.lengths):
            count = length // shape.group
            keys = layer.keys(f, count * shape.group)
            if not count:
                continue
            signs, scales, zeros = quantize_keys(keys, shape.group)
            ours = layer.sidecar.dense(layer.tables[f], count)
            assert (ours[0] is None) == (not shape.has_codes)
            assert ours[0] is None or torch.equal(ours[0], signs)
            assert torch.equal(ours[1], scales) and torch.equal(ours[2], zeros)

    @pytest.mark.parametrize(
        ("skips", "skipped"),
        [((), None), ((0, 2), torch.float8_e4m3fn), ((0, 2), torch.int8)],
        ids=["alike", "some skip fp8", "some skip int8"],
    )
    def test_layers_of_other_segments_and_groups(
        self, skips: Sequence[int], skipped: torch.dtype | None, device: str
    ) -> None:
        """Each layer by the block table of its KV group, and only jobs of its segment."""
        plain = Shape((96, 70), heads=2, kv_heads=2, head_dim=32, spare=32)
        quantized = replace(plain, cache_dtype=skipped, spare=0) if skips else plain
        shapes = [plain if number in skips else quantized for number in range(4)]
        # By layer: KV group and segment. Two KV groups make up the first segment.
        groups, segments = [0, 1, 2, 0], [0, 0, 1, 0]
        seeds = [3, 4, 5, 3]
        layers = [Layer.of(shape, seed, device) for shape, seed in zip(shapes, seeds, strict=True)]
        tables = [layers[i].tables for i in (0, 1, 2)]
        jobs = [(0, 0, 0), (0, 0, 2), (1, 1, 1), (0, 1, 1), (1, 0, 0)]
        index_of_all = plain.index
        writer = index_of_all.writer([(x.paged, x.sidecar) for x in layers], groups, segments)

        def expect(index: int) -> Tensor:
            layer = Layer.of(shapes[index], seeds[index], device)
            for segment, request, group in jobs:
                if segment == segments[index]:
                    table = layer.tables[request]
                    where = layer.paged, layer.sidecar, table
                    index_of_all.write_in_torch(*where, group, group + 1)
            return layer.raw

        untouched = [layer.raw.clone() for layer in layers]
        writer.write(jobs_of([], device), *pointers(tables))
        writer.write(jobs_of(jobs, device), *pointers(tables), layer=2)
        for i, layer in enumerate(layers):
            assert torch.equal(layer.raw, expect(2) if i == 2 else untouched[i])
        writer.write(jobs_of(jobs, device), *pointers(tables))
        for i, layer in enumerate(layers):
            assert torch.equal(layer.raw, expect(i)), i

    def test_extreme_keys(self, device: str) -> None:
        """Equal keys, signed zeros, ranges past float16, and single keys at the edge."""
        shape = Shape((160,), heads=1, kv_heads=1, head_dim=32, dtype=torch.bfloat16)
        layer, expected = (Layer.of(shape, 0, device) for _ in range(2))
        for each in (layer, expected):
            rows = [each.paged.keys[block, 0] for block in each.tables[0, :5].tolist()]
            rows[0][:] = 0.5
            rows[1][:, ::2], rows[1][:, 1::2] = 0.0, -0.0
            rows[2][0], rows[2][1:] = 3e38, -1e38
            rows[3][:] = 1e-6
            rows[4][:-1], rows[4][-1] = 1.0, 1.0078125
        writer = shape.index.writer([(layer.paged, layer.sidecar)], [0], [0])
        writer.write(jobs_of([(0, 0, g) for g in range(5)], device), *pointers([layer.tables]))
        shape.index.write_in_torch(expected.paged, expected.sidecar, expected.tables[0], 0, 5)
        assert torch.equal(layer.raw, expected.raw)
        signs, scales, zeros = layer.sidecar.dense(layer.tables[0], 5)
        assert signs is not None and scales.isfinite().all() and zeros.isfinite().all()
        assert (signs[0, :64] == 1).all(), "keys at the middle of their group are positive"

    def test_every_channel_has_a_bit(self) -> None:
        assert sorted(channel_bits(32).tolist()) == list(range(32))
        assert torch.equal(channel_bits(64), channel_bits(32).repeat(2))

    def test_bytes(self) -> None:
        """An eighth of the keys' bytes at 16 bits, in groups of 32."""
        assert ONE_BIT.page_bytes(PageShape(8, 32, 128, 32)) * 8 == 8 * 32 * 128 * 2
        assert PAGE_BOUNDS.page_bytes(PageShape(8, 32, 128, 16)) == 8 * 2 * 2 * 128 * 2

    def test_layouts_that_cannot_be(self) -> None:
        with pytest.raises(ValueError, match=r"do not divide.*--block-size to a multiple of 64"):
            PageShape(2, 32, 64, 64)
        with pytest.raises(ValueError, match="multiple of 32, this model has 80"):
            ONE_BIT.page_bytes(PageShape(2, 32, 80, 32))
        PAGE_BOUNDS.page_bytes(PageShape(2, 32, 80, 16))

    def test_pages_without_room(self) -> None:
        page = PageShape(2, 32, 32, 32)
        with pytest.raises(ValueError, match=f"no room for {ONE_BIT.page_bytes(page)} more"):
            ONE_BIT.view(torch.zeros(3, 2, 32, 64), page)
