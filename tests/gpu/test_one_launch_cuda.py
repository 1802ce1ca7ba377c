"""FIER's layer in one launch, against three and plain torch. Skipped where nothing takes it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.ragged import make_sinks
from torch import Tensor

from vllm_kvx.equations.softmax import softmax
from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.retrieval import cuda as cuda_ops
from vllm_kvx.ops.retrieval.one_launch import CAPABILITY, MAX_ROWS, OneLaunch
from vllm_kvx.ops.retrieval.retrieve import Scratch, retrieve
from vllm_kvx.ops.retrieval.rows import RetrievalRows

from .retrieval_cases import (
    BF16,
    E4M3,
    FP16,
    KEY_SCALE,
    VALUE_SCALE,
    Case,
    Scores,
    make_case,
    rows_of,
    run_score,
)

_REASON = cuda_ops.why_not() or (
    ""
    if torch.cuda.get_device_capability() == CAPABILITY
    else f"one launch is taken by compute capability {CAPABILITY} alone"
)
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON)


class Launches:
    """Layers of one case in one launch, which keeps its scratch from one to the next."""

    def __init__(self, case: Case, budgets: Sequence[int]) -> None:
        self.case, heads, self.budgets = case, case.q.shape[1], list(budgets)
        scratch = Scratch.of(
            INDEXES["one_bit"],
            num_heads=heads,
            kv_heads=case.num_kv_heads,
            head_dim=case.q.shape[2],
            max_rows=len(budgets),
            capacity=4,  # scores are written nowhere
            max_units=max(*budgets, 1),
            unit=1,
            reduction="max",
            device=case.q.device,
            backend="cuda",
            dtype=case.q.dtype,
        )
        scratch.scores.fill_(float("nan")), scratch.partial.fill_(float("nan"))
        scratch.partial_lse.fill_(float("nan")), scratch.indices.fill_(-1)
        self.scratch, self.out = scratch, torch.full_like(case.q, float("nan"))
        assert scratch.one_launch is not None
        self.one: OneLaunch = scratch.one_launch
        unused = torch.zeros(len(budgets), dtype=torch.int64, device=case.q.device)
        at_most = torch.tensor(self.budgets, dtype=torch.int32, device=case.q.device)
        self.rows = RetrievalRows(case.tokens, case.requests, case.lens, at_most, unused)

    @property
    def are_taken(self) -> bool:
        case = self.case
        return self.one.takes(case.q, case.paged, case.block_table, len(self.budgets), None)

    def run(self, scale: float, sinks: Tensor | None = None) -> Tensor:
        case = self.case
        retrieve(
            case.q,
            case.paged,
            case.sidecar,
            case.block_table,
            self.rows,
            self.scratch,
            self.out,
            scale=scale,
            key_scale=KEY_SCALE,
            value_scale=VALUE_SCALE,
            sinks=sinks,
        )
        return self.out

    def check(self, scale: float, sinks: Tensor | None = None) -> None:
        """What the last `run` wrote, and that all else is as it was."""
        assert (self.scratch.indices == -1).all(), "three launches ran"
        assert not self.one.counters.any()
        check_out(self.case, self.budgets, self.out, scale, sinks)


def check_out(
    case: Case, budgets: list[int], out: Tensor, scale: float, sinks: Tensor | None = None
) -> None:
    """Against attention, in torch, to the best by the scores of the op that only scores.

    With a scale of 0 all entries weigh the same: one too many, one too few or another one shows.
    """
    lens = case.lens.tolist()
    scores = Scores.of(lens, case.num_kv_heads)
    run_score(case, scores, "max", 264)
    share, size = case.q.shape[1] // case.num_kv_heads, case.paged.block_size
    untouched = torch.ones(case.q.shape[0], dtype=torch.bool, device=out.device)
    for row, (length, budget) in enumerate(zip(lens, budgets, strict=True)):
        if not length:
            continue
        token, count = int(case.tokens[row]), min(length, budget)
        untouched[token] = False
        best = (scores.row(row) + 0.0).sort(dim=1, descending=True, stable=True).indices
        query = case.query(row).unflatten(0, (-1, share)).float()
        for head, entry in enumerate(best[:, :count]):
            block = case.table(row)[entry // size].long()
            keys = case.paged.keys[block, head, entry % size].float() * KEY_SCALE
            values = case.paged.values[block, head, entry % size].float() * VALUE_SCALE
            mine = None if sinks is None else sinks[head * share : (head + 1) * share]
            expected = softmax(query[head] @ keys.T * scale, mine) @ values
            got = out[token, head * share : (head + 1) * share].float()
            rounding = 2.0**-8 if case.q.dtype == BF16 else 2.0**-11
            # Of another entry some channel would differ by several times as much.
            allowed = 2e-2 if scale else 0.7 / max(count, 1) + rounding * expected.abs().max()
            assert (got - expected).abs().max() <= allowed, (row, head)
    assert out[untouched].isnan().all()


def check(case: Case, budget: int, sinks: Tensor | None = None) -> None:
    layers = Launches(case, [budget >> row % 2 for row in range(len(case.lens))])
    assert layers.are_taken
    for scale in (0.0, case.q.shape[2] ** -0.5):
        for _ in range(2):  # the second one finds what the first one left
            layers.out.fill_(float("nan"))
            first = layers.run(scale, sinks).clone()
            layers.check(scale, sinks)
        assert torch.equal(first.nan_to_num(7), layers.run(scale, sinks).nan_to_num(7))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "shape",
    [
        dict(share=4),
        dict(share=1, dtype=FP16, block_size=96, nhd=True),
        dict(share=2),
        dict(share=3),
        dict(share=5),
        dict(share=6, block_size=544, nhd=True),
        dict(share=7),
        dict(share=8, group=64, block_size=64, dtype=FP16),
    ],
    ids=str,
)
def test_shapes(head_dim: int, shape: dict[str, Any]) -> None:
    check(make_case([40_001, 0, 5000, 65], kv_heads=4, head_dim=head_dim, **shape), 512)


@pytest.mark.parametrize(
    ("lens", "kv_heads"),
    [
        ([1, 31, 32, 33], 8),
        ([63, 64, 65, 0], 8),
        ([127, 128, 129, 1023], 8),
        ([1025, 2047, 2049, 4099], 8),
        ([0, 0], 8),
        ([0], 8),
        ([1], 8),  # alone, most CTAs have nothing to do
        ([65], 8),
        ([40_001, 0, 5000, 65], 3),
        ([40_001, 0, 5000, 65], 5),
        ([40_001, 0, 5000, 65], 6),
        ([40_001, 0, 5000, 65], 7),
        ([300_000], 2),
        ([300_000, 5], 1),
        ([70_000], 32),
    ],
    ids=str,
)
@pytest.mark.parametrize("budget", [64, 1024, 4096])
def test_lengths_and_budgets(lens: list[int], kv_heads: int, budget: int) -> None:
    share = 1 if kv_heads == 32 else 4
    check(make_case(lens, kv_heads=kv_heads, share=share), budget)


@pytest.mark.parametrize("kind", ["equal", "equal in a group", "in few bins", "in one bin"])
@pytest.mark.parametrize("lens", [[130_000], [30_000, 20_001, 0, 400]], ids=str)
def test_scores_that_are_close(kind: str, lens: list[int]) -> None:
    """More share a bin than are listed, and ties of which the first ones are selected."""
    case = make_case(lens, kv_heads=8)
    scales, zeros = case.sidecar.scales[:, :, :, 0], case.sidecar.scales[:, :, :, 1]
    if kind.startswith("equal"):
        scales.mul_(0)
        if kind == "equal":
            zeros.mul_(0)
    else:
        scales.mul_(2.0**-6 if kind == "in few bins" else 2.0**-10)
        zeros.mul_(0).add_(1)  # whatever must not be read stays NaN
        case.q.abs_()
    check(case, 2048)


def test_longest() -> None:
    """Rows as long as shared memory has room for, and none of a longer block table."""
    one = Launches(make_case([64] * 4, kv_heads=8), [64] * 4).one
    for rows, longest in enumerate(one.longest, 1):
        assert longest % 64 == 0
        if rows in (1, 3):  # they take gigabytes
            continue
        case = make_case([longest - 64] * rows, kv_heads=8, head_dim=128)
        layers = Launches(case, [1024] * rows)
        assert case.block_table.shape[1] * 32 == longest and layers.are_taken
        layers.run(0.0)
        layers.check(0.0)
    wider = torch.nn.functional.pad(case.block_table, (0, 1))
    assert not one.takes(case.q, case.paged, wider, rows, None)
    parts = layers.scratch.parts(rows, one.splits)
    with pytest.raises(RuntimeError, match="do not fit in shared memory"):
        cuda_ops.fused(
            case.q,
            *(case.sidecar.codes, case.sidecar.scales, case.paged.keys, case.paged.values, wider),
            *(case.tokens, case.requests, case.lens, layers.rows.budgets, one.state, *parts),
            *(layers.out, 32, 1.0, 1.0, 1.0, 1024, one.splits, one.multiprocessors),
        )


@pytest.mark.parametrize(("head_dim", "share"), [(128, 4), (64, 8)])
def test_rows_of_one_request_and_sinks(head_dim: int, share: int) -> None:
    """As drafts are verified: each row sees one entry more than the one before."""
    case = make_case([20_000, 19_999, 19_998], kv_heads=2, head_dim=head_dim, share=share)
    case.requests.copy_(case.requests[:1].expand(3).clone())
    for dtype in (BF16, torch.float32):
        sinks = make_sinks(case.q.shape[1], "cuda", dtype)
        sinks[1] = -torch.inf  # no sink
        check(case, 256, sinks)


def test_graph() -> None:
    """Layers of a step captured once, and replayed on other lengths."""
    lens, budget = [60_000, 40_001, 400, 0], 1024
    case = make_case(lens, kv_heads=8, seed=5)
    layers = Launches(case, [budget] * len(lens))
    assert layers.are_taken
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first launch, which raises limits of the kernel
        for _ in range(3):
            layers.run(0.0)
    for shorter in (0, 1, 65, 399, 50_000, 0):
        case.lens.copy_(torch.tensor([max(n - shorter, 0) for n in lens], dtype=torch.int32))
        layers.out.fill_(float("nan"))
        for _ in range(30):
            graph.replay()
        layers.check(0.0)


def test_what_is_done_by_three() -> None:
    """More rows, caches of 8 bits, capped logits, and more heads than the launch knows."""
    many = make_case([100] * (MAX_ROWS + 1), kv_heads=1)
    assert not Launches(many, [64] * len(many.lens)).are_taken
    case = make_case([100], cache_dtype=E4M3)
    assert not Launches(case, [64]).are_taken
    case = make_case([100])
    one = Launches(case, [64]).one
    assert one.takes(case.q, case.paged, case.block_table, 1, None)
    assert not one.takes(case.q, case.paged, case.block_table, 1, 30.0)
    for share, kv_heads in ((16, 2), (1, 64)):
        assert OneLaunch.of(share * kv_heads, kv_heads, 128, 4, torch.device("cuda")) is None


def test_choice_for_recall() -> None:
    """Steps whose recall is measured read what was chosen."""
    case = make_case([5000, 300], kv_heads=4)
    layers = Launches(case, [128, 64])
    chooses = layers.scratch.that_chooses
    scores = Scores.of([5000, 300], 4)
    layers.scratch = replace(chooses, scores=scores.values)
    layers.rows = rows_of(case.lens, [128, 64], scores, case)
    layers.run(0.0)
    check_out(case, [128, 64], layers.out, 0.0)
    assert (layers.scratch.indices[0, :, :128] >= 0).all() and layers.scratch.counts[1, 0] == 64
