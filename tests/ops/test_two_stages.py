"""A choice in two stages as scores; under Triton's interpreter on CPU."""

import pytest
import torch
from support.ragged import offsets_of, poisoned_outputs
from torch import Tensor

from vllm_kvx.ops.prompt.select import select_kept
from vllm_kvx.ops.prompt.two_stages import (
    EPSILON,
    two_stage_scores,
    two_stage_scores_reference,
)

UNUSED = 5
LARGEST = torch.finfo(torch.float32).max


class Case:
    """Prompts with attention of few different values, so that many are equal."""

    def __init__(
        self, seed: int, lengths: list[int], caps: list[int], device: str, values: int = 6
    ) -> None:
        rng = torch.Generator(device).manual_seed(seed)
        rows, total = 2, sum(lengths)

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.num_keys, self.caps = ints(lengths), ints(caps)
        self.windows = ints([min(8, length) for length in lengths])
        self.offsets = offsets_of(self.num_keys)
        shape = (rows, total + UNUSED)
        drawn = torch.randint(values, shape, generator=rng, device=device)
        self.attention = drawn.float() / values
        drawn = torch.randint(values, shape, generator=rng, device=device)
        self.unpooled: Tensor | None = drawn.float()
        self.norms = torch.rand(shape, generator=rng, device=device)
        for f, window in enumerate(self.windows.tolist()):
            end = int(self.offsets[f + 1])
            for scores in (self.attention, self.unpooled, self.norms):
                scores[:, end - window : end] = float("nan")

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        sizes = (self.num_keys, self.windows, self.caps, self.offsets)
        return (self.attention, self.unpooled, self.norms, *sizes)

    def scores(self, block: int = 64, group: int | None = 2) -> Tensor:
        with poisoned_outputs():
            scores = two_stage_scores(*self.arguments, group=group, block=block)  # type: ignore[arg-type]
        total = int(self.offsets[-1])
        assert scores[:, total:].isnan().all(), "wrote past the batch"
        return scores[:, :total]


CASES = [
    ([300, 8, 65, 64, 1], [40, 8, 20, 63, 1]),
    ([100, 0, 90], [9, 0, 8]),
    ([200, 33], [199, 10]),
    ([50, 20], [60, 20]),
]


@pytest.mark.parametrize("pools", [True, False])
@pytest.mark.parametrize(("lengths", "caps"), CASES)
def test_matches_reference(lengths: list[int], caps: list[int], pools: bool, device: str) -> None:
    for values, block in ((1, 128), (6, 128), (1000, 512)):
        case = Case(0, lengths, caps, device, values)
        case.unpooled = case.unpooled if pools else None
        expected = two_stage_scores_reference(*case.arguments, group=2)  # type: ignore[arg-type]
        scores = case.scores(block)
        assert torch.equal(scores.isinf(), expected.isinf())
        torch.testing.assert_close(scores, expected, rtol=1e-6, atol=0)


def test_products_that_are_sums_over_heads(device: str) -> None:
    """What is no part of the first stage has its product, as it came."""
    case = Case(0, [300, 65], [40, 20], device, 1000)
    expected = two_stage_scores_reference(*case.arguments, group=None)  # type: ignore[arg-type]
    assert torch.equal(case.scores(128, group=None), expected)
    columns = slice(0, 300 - 8)
    later = ~expected[:, columns].isinf()
    assert torch.equal(expected[:, columns][later], case.norms[:, columns][later])
    assert (~later).sum(dim=1).tolist() == [16, 16]


def test_selected_by_hand(device: str) -> None:
    """Two keys by attention, three of the rest by the product, and the window."""
    case = Case(1, [12], [7], device)
    case.windows[0] = 2
    attention = [5.0, 4, 3, 3, 1, 1, 1, 0, 0, 0, float("nan"), float("nan")]
    norms = [0.0, 0, 1, 1.01, 1, 8, 1, 1, 9, 1e9, float("nan"), float("nan")]
    case.attention = torch.tensor([attention], device=device)
    case.norms = torch.tensor([norms], device=device)
    case.unpooled = None
    sizes = (case.num_keys, case.windows, case.caps, case.offsets)
    scores = two_stage_scores(case.attention, None, case.norms, *sizes, group=2)
    assert scores[0].isinf().tolist() == [True] * 2 + [False] * 10
    assert scores[0, 9] == pytest.approx(EPSILON * 4 * 1e9)
    kept = select_kept(scores, *sizes, offsets_of(case.caps), 7)
    assert kept[0].tolist() == [0, 1, 3, 5, 9, 10, 11]


def test_equal_attention_goes_by_the_unpooled(device: str) -> None:
    case = Case(2, [20], [10], device)
    case.windows[0] = 4
    case.attention = torch.ones(1, 20, device=device)
    case.norms = torch.zeros(1, 20, device=device)
    peaks = torch.zeros(1, 20, device=device)
    peaks[0, [11, 13]] = torch.tensor([2.0, 1.0], device=device)
    case.unpooled = peaks
    sizes = (case.num_keys, case.windows, case.caps, case.offsets)
    scores = two_stage_scores(case.attention, peaks, case.norms, *sizes, group=1)
    assert scores[0].isinf().nonzero()[:, 0].tolist() == [0, 11, 13]


def test_what_is_no_number_ranks_below_the_first_stage(device: str) -> None:
    case = Case(3, [20], [8], device)
    case.windows[0] = 2
    case.attention = torch.arange(20.0, device=device)[None]
    case.norms = torch.ones(1, 20, device=device)
    case.norms[0, 3:5] = torch.tensor([float("nan"), float("inf")], device=device)
    sizes = (case.num_keys, case.windows, case.caps, case.offsets)
    scores = two_stage_scores(case.attention, None, case.norms, *sizes, group=1)[0]
    assert scores.isinf().nonzero()[:, 0].tolist() == [15, 16, 17]
    assert scores[3:5].tolist() == [LARGEST] * 2 and not scores.isnan().any()


def test_batched_is_alone_bit_for_bit(device: str) -> None:
    case = Case(4, [150, 300, 33], [30, 77, 12], device, 50)
    together = case.scores()
    for f in range(3):
        first, last = case.offsets[f : f + 2].tolist()
        assert case.unpooled is not None
        one = slice(f, f + 1)
        parts = (part[:, first:last] for part in (case.attention, case.unpooled, case.norms))
        sizes = (case.num_keys[one], case.windows[one], case.caps[one])
        alone = two_stage_scores(*parts, *sizes, offsets_of(case.num_keys[one]), group=2, block=64)
        assert torch.equal(together[:, first:last], alone[:, : last - first])
