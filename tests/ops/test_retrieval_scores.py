"""What a step reads: scores and their largest, against their references; interpreted on CPU."""

from collections.abc import Sequence

import pytest
import torch
from support.nightly import by_day
from support.retrieved_layers import (
    SCALE,
    SHAPES,
    UNWRITTEN,
    Layer,
    Rows,
    Shape,
    expected_scores,
    rows_of,
    scored,
    with_each_shape,
)
from torch import Tensor

from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.ops.retrieval.topk import top_units, top_units_reference
from vllm_kvx.policy.axes import REDUCTIONS

pytestmark = pytest.mark.usefixtures("bfloat16_in_the_interpreter")


class TestScores:
    @with_each_shape("reduction", REDUCTIONS)
    def test_match_the_policy(self, shape: Shape, reduction: str, device: str) -> None:
        layer = Layer.of(shape, 0, device).fill()
        host = rows_of(shape, device)
        rows, count = host.on_device, len(host.lens)
        query = layer.query(count + 2)
        splits = 1 + SHAPES.index(shape) % 3 * 2
        scores = torch.full((shape.kv_heads, host.capacity + 4), float("nan"), device=device)
        stats = torch.full((count, shape.heads, splits, 2), float("nan"), device=device)
        shape.index.score_in_triton(
            query,
            layer.sidecar,
            layer.tables,
            rows,
            scores,
            stats,
            reduction=reduction,
            scale=SCALE,
            splits=splits,
        )
        written = torch.zeros_like(scores, dtype=torch.bool)
        for r, length in enumerate(host.lens):
            if not length:
                continue
            request, q = host.requests[r], query[host.tokens[r]]
            expected = expected_scores(layer, q, request, length, reduction)
            where = slice(int(rows.offsets[r]), int(rows.offsets[r]) + host.units(r))
            ours = scores[:, where]
            written[:, where] = True
            # Products are sums of D terms; shares of a softmax are at most 1.
            near = dict(rtol=1e-4, atol=1e-6 if reduction == "softmax" else 1e-3)
            torch.testing.assert_close(ours, expected, **near)
            if length > shape.group:
                reference = shape.index.score_in_torch(
                    q, layer.sidecar, layer.tables[request], length, reduction, SCALE
                )
                torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-5)
        assert scores[~written].isnan().all(), "wrote past a row's units"

    @pytest.mark.parametrize("factor", [1e-3, 300.0])
    def test_products_keep_their_digits(self, factor: float, device: str) -> None:
        """Queries of 8 bits and scales of 11, multiplied in float16, of any magnitude."""
        shape = Shape((130,), heads=12, kv_heads=1, head_dim=128, dtype=torch.bfloat16)
        layer = Layer.of(shape, 0, device).fill()
        rows = Rows([0], [0], [130], [64], 1, device).on_device
        query = layer.query(1) * factor
        scores = torch.full((1, 132), float("nan"), device=device)
        stats = torch.empty(0, device=device)
        shape.index.score_in_triton(
            query,
            layer.sidecar,
            layer.tables,
            rows,
            scores,
            stats,
            reduction="max",
            scale=1.0,
            splits=2,
        )
        expected = shape.index.score_in_torch(
            query[0], layer.sidecar, layer.tables[0], 130, "max", 1.0
        )
        off = (scores[:, :128] - expected[:, :128]).abs().max()
        assert off <= 2e-6 * expected[:, :128].abs().max()

    def test_large_scores_do_not_overflow_a_softmax(self, device: str) -> None:
        """Over splits some of which have no group at all."""
        shape = Shape((161,), heads=2, kv_heads=1, head_dim=32)
        layer = Layer.of(shape, 0, device)
        keys = layer.paged.keys
        keys[layer.tables[0, 3].long()] *= 100
        layer.fill()
        rows = Rows([0], [0], [161], [64], 1, device).on_device
        query = layer.query(1) * 30
        scores = torch.full((1, 164), float("nan"), device=device)
        stats = torch.full((1, 2, 9, 2), float("nan"), device=device)
        shape.index.score_in_triton(
            query,
            layer.sidecar,
            layer.tables,
            rows,
            scores,
            stats,
            reduction="softmax",
            scale=1.0,
            splits=9,
        )
        expected = shape.index.score_in_torch(
            query[0], layer.sidecar, layer.tables[0], 161, "softmax", 1.0
        )
        assert expected[:, :160].sum().item() == pytest.approx(2.0, rel=1e-4)
        torch.testing.assert_close(scores[:, :161], expected, rtol=1e-3, atol=1e-6)


KINDS = ("normal", "plateaus", "equal", "zeros", "neighbours", "extremes")


class TestTopUnits:
    def select(
        self, host: Rows, scores: Sequence[Sequence[Tensor]], most: int, fused: bool = False
    ) -> tuple[RetrievalRows, Tensor, Tensor]:
        """Runs the kernel; scores by row and head."""
        rows = host.on_device
        flat = torch.full((len(scores[0]), host.capacity + 4), float("nan"))
        for r, heads in enumerate(scores):
            for g, each in enumerate(heads):
                flat[g, int(rows.offsets[r]) : int(rows.offsets[r]) + len(each)] = each
        shape = (len(host.lens), len(scores[0]))
        indices = torch.full((*shape, most), UNWRITTEN, dtype=torch.int32, device=host.device)
        counts = torch.full(shape, UNWRITTEN, dtype=torch.int32, device=host.device)
        # Fused, several programs share a row.
        splits = 3 if fused else None
        top_units(
            *(flat.to(host.device), rows, indices, counts),
            unit=host.unit,
            splits=splits,
            fused=fused,
        )
        return rows, indices.cpu(), counts.cpu()

    @pytest.mark.parametrize(
        ("kind", "unit", "fused"),
        by_day(
            [(kind, *form) for kind in KINDS for form in ((1, False), (16, False), (1, True))],
            range(0, 3 * len(KINDS), 2),
        ),
    )
    def test_matches_reference(self, kind: str, unit: int, fused: bool, device: str) -> None:
        rng = torch.Generator().manual_seed(KINDS.index(kind))
        units = [300, 0, 65, 64, 40, 1, 129, 7]
        budgets = [70, 64, 64, 64, 1, 1, 128, 3]
        lens = [n * unit - (unit > 1) * (r % unit) if n else 0 for r, n in enumerate(units)]
        host = Rows([0] * 8, [0] * 8, lens, budgets, unit, device)
        scores = [[scored(kind, n, rng) for _ in range(2)] for n in units]
        _, indices, counts = self.select(host, scores, 130, fused)
        for r, (heads, budget) in enumerate(zip(scores, budgets, strict=True)):
            for g, each in enumerate(heads):
                count = min(budget, len(each))
                assert counts[r, g] == count
                ours = indices[r, g, :count].long()
                theirs = top_units_reference(each, budget)
                assert torch.equal(ours, theirs), (kind, r, g)
                assert (indices[r, g, count:] == UNWRITTEN).all(), "wrote past the count"

    @pytest.mark.parametrize("fused", [False, True])
    def test_long_rows(self, fused: bool, device: str) -> None:
        """Longer than what one program reads at once, ties on both sides of the seam."""
        rng = torch.Generator().manual_seed(9)
        host = Rows([0, 0, 0], [0, 0, 0], [4097, 8200, 9000], [4096, 300, 9001], 1, device)
        scores = [
            [scored("plateaus", 4097, rng)],
            [scored("extremes", 8200, rng)],
            [torch.full((9000,), float("nan"))],  # Not read: the budget is longer.
        ]
        _, indices, counts = self.select(host, scores, 9001, fused)
        assert counts[:, 0].tolist() == [4096, 300, 9000]
        for r, budget in ((0, 4096), (1, 300)):
            theirs = top_units_reference(scores[r][0], budget)
            assert torch.equal(indices[r, 0, :budget].long(), theirs)
        assert indices[2, 0, :9000].tolist() == list(range(9000))

    def test_every_budget_of_a_plateau(self, device: str) -> None:
        row = torch.tensor([2.0, 1, 3, 2, 2, 1, float("inf"), 0, 2])
        budgets = list(range(1, 11))
        host = Rows([0] * 10, [0] * 10, [9] * 10, budgets, 1, device)
        _, indices, counts = self.select(host, [[row]] * 10, 10)
        assert counts[:, 0].tolist() == [min(n, 9) for n in budgets]
        assert indices[3, 0, :4].tolist() == [0, 2, 3, 6]
