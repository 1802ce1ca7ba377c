"""Selection and moves against their torch references; under Triton's interpreter on CPU."""

from typing import Any

import pytest
import torch
from support.ragged import LAYOUTS, Batch, make_batch, offsets_of, poisoned_outputs, same_bits
from torch import Tensor

from vllm_kvx.equations import saliency as dense
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.move import move_entries, move_entries_reference
from vllm_kvx.ops.prompt.select import (
    select_kept,
    select_kept_reference,
    select_moves,
    select_moves_reference,
)

POISON = torch.iinfo(torch.int32).max
UNUSED = 3


class Selection:
    """A ragged batch of scores and what both operators make of it."""

    def __init__(
        self,
        scores: list[Tensor],
        windows: list[int],
        caps: list[int],
        *,
        block: int = 128,
        unpooled: list[Tensor] | None = None,
        splits: int | None = None,
        device: str = "cpu",
    ) -> None:
        """Scores of each request, (R, keys outside its window), and those before pooling."""

        def padded(each: list[Tensor]) -> list[Tensor]:
            return [
                torch.nn.functional.pad(s, (0, w), value=float("nan"))
                for s, w in zip(each, windows, strict=True)
            ]

        lengths = [s.shape[1] for s in padded(scores)]
        self.scores = torch.cat(padded(scores), dim=1).to(device)
        self.unpooled = None
        if unpooled is not None:
            # Another stride than the scores'.
            self.unpooled = torch.cat([*padded(unpooled), torch.zeros(len(scores[0]), 5)], dim=1)
            self.unpooled = self.unpooled.to(device)
        self.num_keys, self.windows, self.caps = (
            torch.tensor(sizes, dtype=torch.int32, device=device)
            for sizes in (lengths, windows, caps)
        )
        self.offsets = offsets_of(self.num_keys)
        self.out_offsets = offsets_of(torch.minimum(self.num_keys, self.caps))
        self.total = int(self.out_offsets[-1]) + UNUSED
        self.sizes = (self.num_keys, self.windows, self.caps, self.offsets)
        arguments = (self.scores, *self.sizes, self.out_offsets, self.total, block)
        with poisoned_outputs():
            options = {"unpooled": self.unpooled, "splits": splits}
            self.kept = select_kept(*arguments, **options)
            self.sources, self.targets, self.num_moves = select_moves(*arguments, **options)

    def check(self) -> None:
        kept = select_kept_reference(self.scores, *self.sizes, self.unpooled)
        assert torch.equal(self.kept[:, : -UNUSED or None].long(), torch.cat(kept, dim=1))
        assert (self.kept[:, -UNUSED:] == POISON).all(), "wrote past the batch"
        expected = torch.full_like(self.sources, POISON), torch.full_like(self.targets, POISON)
        counts = torch.full_like(self.num_moves, POISON)
        moves = select_moves_reference(self.scores, *self.sizes, self.unpooled)
        for f, rows in enumerate(moves):
            for r, (sources, targets) in enumerate(rows):
                columns = slice(int(self.out_offsets[f]), int(self.out_offsets[f]) + len(sources))
                expected[0][r, columns], expected[1][r, columns] = sources.int(), targets.int()
                counts[r, f] = len(sources)
        assert torch.equal(self.num_moves, counts)
        assert torch.equal(self.sources, expected[0])
        assert torch.equal(self.targets, expected[1])


def scored(kind: str, rows: int, count: int, rng: torch.Generator) -> Tensor:
    """(rows, count) scores of one kind, each kind a hard case of its own."""
    uniform = torch.rand(rows, count, generator=rng)
    if kind == "distinct":
        return uniform
    if kind == "plateaus":
        return (uniform * 4).floor().repeat_interleave(7, dim=1)[:, :count] / 3
    if kind == "equal":
        return torch.full((rows, count), 0.125)
    if kind == "zero":
        return torch.zeros(rows, count)
    if kind == "neighbours":  # Floats that differ in their last two bits.
        bits = torch.tensor(0.7).view(torch.int32) + (uniform * 4).int()
        return bits.view(torch.float32)
    assert kind == "extremes"
    extremes = torch.tensor([0.0, 1e-45, 1e-38, 1.0, 2.0, 3.4e38, float("inf")])
    return extremes[(uniform * len(extremes)).long()]


KINDS = ("distinct", "plateaus", "equal", "zero", "neighbours", "extremes")


@pytest.mark.parametrize("kind", KINDS)
def test_matches_reference(kind: str, device: str) -> None:
    rng = torch.Generator().manual_seed(KINDS.index(kind))
    windows, outside = [8, 1, 5, 3], [400, 77, 130, 0]
    caps = [40, 50, 100, 3]
    scores = [scored(kind, 2, count, rng) for count in outside]
    Selection(scores, windows, caps, device=device).check()


def test_caps_at_their_edges(device: str) -> None:
    rng = torch.Generator().manual_seed(7)
    window, outside = 4, 30
    caps = [window, window + 1, outside + window - 1, outside + window, outside + window + 9, 1000]
    scores = [scored("plateaus", 1, outside, rng) for _ in caps]
    Selection(scores, [window] * len(caps), caps, block=64, device=device).check()


def test_window_is_everything_and_padding(device: str) -> None:
    rng = torch.Generator().manual_seed(8)
    scores = [scored("distinct", 3, count, rng) for count in (0, 0, 20, 0)]
    Selection(scores, [6, 0, 2, 1], [6, 0, 9, 5], device=device).check()


@pytest.mark.parametrize("block", [64, 256, 8192])
def test_any_block(block: int, device: str) -> None:
    rng = torch.Generator().manual_seed(block)
    for count in (block - 8, block - 7, 300):
        scores = [scored("plateaus", 1, count, rng), scored("distinct", 1, 65, rng)]
        Selection(scores, [8, 1], [min(90, count), 64], block=block, device=device).check()


def test_every_count_of_a_plateau(device: str) -> None:
    """The lower indices of a plateau stay, however many of it do."""
    row = torch.tensor([[2.0, 1, 3, 2, 2, 1, 2, 0, 2]])
    caps = list(range(1, 12))
    selection = Selection([row] * len(caps), [1] * len(caps), caps, block=16, device=device)
    selection.check()
    first, last = selection.out_offsets[4:6].tolist()
    assert selection.kept[0, first:last].tolist() == [0, 2, 3, 4, 9]


@pytest.mark.parametrize("peaks", KINDS)
@pytest.mark.parametrize("kind", ["plateaus", "equal", "distinct"])
def test_unpooled_scores_cut_a_plateau(kind: str, peaks: str, device: str) -> None:
    """Plateaus within a block, over several, and over all keys; every kind of score in them."""
    rng = torch.Generator().manual_seed(KINDS.index(peaks))
    windows, outside = [8, 1, 5, 3, 2], [400, 77, 130, 0, 300]
    caps = [40, 50, 100, 3, 302]
    scores, unpooled = ([scored(k, 2, n, rng) for n in outside] for k in (kind, peaks))
    Selection(scores, windows, caps, unpooled=unpooled, device=device).check()


def test_every_count_of_a_plateau_with_a_peak(device: str) -> None:
    """The peak stays first, then what is next to it in height, of equal ones the lower index."""
    row = torch.tensor([[2.0, 1, 3, 2, 2, 1, 2, 0, 2]])
    heights = torch.tensor([[1.0, 9, 0, 2, 1, 9, 3, 9, 0]])
    caps = list(range(1, 12))
    selection = Selection(
        [row] * len(caps), [1] * len(caps), caps, block=16, unpooled=[heights] * 11, device=device
    )
    selection.check()
    for cap, stay in ((3, [2, 6]), (4, [2, 3, 6]), (5, [0, 2, 3, 6]), (6, [0, 2, 3, 4, 6])):
        first, last = selection.out_offsets[cap - 1 : cap + 1].tolist()
        assert selection.kept[0, first:last].tolist() == [*stay, 9], cap


def test_pooled_scores_are_cut_at_their_peaks(device: str) -> None:
    """Scores as they come: pooled heads summed, and the same heads summed without pooling."""
    rng = torch.Generator().manual_seed(3)
    heads = torch.rand(4, 500, generator=rng) ** 20
    pooled, unpooled = (dense.per_kv_head(dense.max_pool(heads, kernel), 2) for kernel in (7, 1))
    caps = [10, 15, 22, 41]
    selection = Selection(
        [pooled] * 4, [8] * 4, caps, block=512, unpooled=[unpooled] * 4, device=device
    )
    selection.check()
    by_position = Selection([pooled] * 4, [8] * 4, caps, block=512, device=device)
    assert not torch.equal(selection.kept, by_position.kept)


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_that_many_programs_find(kind: str, device: str) -> None:
    """Shares of whole blocks, some of them empty; what is above them may cut a plateau."""
    rng = torch.Generator().manual_seed(KINDS.index(kind))
    windows, outside, caps = [8, 5, 3, 2, 0], [4500, 130, 0, 300, 0], [450, 100, 3, 302, 0]
    scores, unpooled = ([scored(k, 1, n, rng) for n in outside] for k in (kind, "plateaus"))
    options: dict[str, Any] = dict(block=2048, splits=3, device=device)
    Selection(scores, windows, caps, unpooled=unpooled, **options).check()


@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize("pooled", [False, True])
def test_nan_is_no_reason_to_lose_count(pooled: bool, splits: int, device: str) -> None:
    """What is kept of broken scores is of no use, but every index is written and valid."""
    scores = torch.full((1, 200), float("nan"))
    scores[0, ::3] = -float("nan")
    scores[0, 1::3] = -1.0
    unpooled = [scores.flip(1)] if pooled else None
    selection = Selection([scores], [2], [50], unpooled=unpooled, splits=splits, device=device)
    kept = selection.kept[0, :50]
    assert (kept.diff() > 0).all() and kept[0] >= 0 and kept[-2:].tolist() == [200, 201]
    moves = int(selection.num_moves[0, 0])
    stay = set(range(50)) - set(selection.targets[0, :moves].tolist())
    assert stay | set(selection.sources[0, :moves].tolist()) == set(kept.tolist())


def clone(paged: PagedKV) -> PagedKV:
    """A copy with strides of its own."""
    return PagedKV(paged.keys.clone(), paged.values.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_leave_the_kept_entries(layout: str, dtype: torch.dtype, device: str) -> None:
    lengths, windows, caps = [300, 40, 17, 5], [8, 1, 17, 2], [60, 39, 17, 9]
    kv_heads, head_dim = 2, 48 if layout == "hnd" else 32
    shape: dict[str, Any] = dict(heads=2, kv_heads=kv_heads, head_dim=head_dim, block_size=32)
    batch = make_batch(
        0, lengths, windows, device=device, layout=layout, cache_dtype=dtype, **shape
    )
    rng = torch.Generator().manual_seed(1)
    scores = [
        scored("plateaus", kv_heads, n - w, rng) for n, w in zip(lengths, windows, strict=True)
    ]
    selection = Selection(scores, windows, caps, block=512, device=device)
    before, expected = clone(batch.paged), clone(batch.paged)
    moves = select_moves_reference(selection.scores, *selection.sizes)
    move_entries_reference(expected, batch.block_tables, moves)
    move_entries(
        batch.paged,
        batch.block_tables,
        selection.sources,
        selection.targets,
        selection.num_moves,
        selection.out_offsets,
        max(caps),
    )
    assert same_bits(batch.paged.keys, expected.keys), "keys of another slot changed"
    assert same_bits(batch.paged.values, expected.values), "values of another slot changed"
    assert_holds_the_kept(before, batch, selection)


def assert_holds_the_kept(before: PagedKV, batch: Batch, selection: Selection) -> None:
    """The first slots hold the kept entries, each once, key and value together."""
    for f, table in enumerate(batch.block_tables):
        kept = selection.kept[:, selection.out_offsets[f] : selection.out_offsets[f + 1]]
        count = kept.shape[1]
        old, new = (
            torch.cat(
                [
                    PagedKV(cache, cache).dense_keys(table, length).float()
                    for cache in (paged.keys, paged.values)
                ],
                dim=-1,
            )
            for paged, length in ((before, int(selection.num_keys[f])), (batch.paged, count))
        )
        for head in range(kept.shape[0]):
            stored = sorted(new[head].tolist())
            assert stored == sorted(old[head, kept[head].long()].tolist())
