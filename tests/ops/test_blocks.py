"""The blocks of a prompt that stay, against a list of blocks sorted by hand."""

import pytest
import torch
from torch import Tensor

from vllm_kvx.ops.prompt.blocks import top_blocks


def blocks_of(count: int, size: int, window: int) -> tuple[list[range], list[int]]:
    """Entries of every block, and the blocks that the last `window` entries touch."""
    blocks = [range(first, min(first + size, count)) for first in range(0, count, size)]
    return blocks, [i for i, block in enumerate(blocks) if block.stop > count - window]


def naive(centrality: list[float], num_blocks: int, size: int, window: int) -> list[int]:
    blocks, touched = blocks_of(len(centrality), size, window)
    ranked = [(-sum(centrality[i] for i in block), b) for b, block in enumerate(blocks)]
    others = sorted(pair for pair in ranked if pair[1] not in touched)
    return sorted([b for _, b in others[: num_blocks - len(touched)]] + touched)


def kept(centrality: Tensor, num_blocks: int, size: int, window: int) -> list[int]:
    stay = top_blocks(centrality, num_blocks=num_blocks, block_size=size, window=window)
    assert stay.dtype == torch.int64 and stay.device == centrality.device
    return stay.tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 20])
def test_matches_a_sorted_list(size: int, window: int, device: str) -> None:
    """All lengths and counts; few different whole numbers, so that many blocks are equal."""
    rng = torch.Generator().manual_seed(size * 100 + window)
    for count in range(1, 28):
        centrality = torch.randint(0, 3, (count,), generator=rng).float()
        poisoned = centrality.clone()
        poisoned[-window:] = float("nan")  # The window's own scores mean nothing.
        blocks, touched = blocks_of(count, size, window)
        for num_blocks in range(len(touched), len(blocks) + 1):
            stay = kept(poisoned.to(device), num_blocks, size, window)
            assert stay == naive(centrality.tolist(), num_blocks, size, window)
            # The last one may be partial; blocks that are re-linked end with it.
            assert len(stay) == num_blocks and stay[-1] == len(blocks) - 1


@pytest.mark.parametrize(
    ("count", "window", "num_blocks", "expected"),
    [
        (16, 4, 1, [3]),  # As many as the window touches.
        (16, 5, 2, [2, 3]),  # Over the edge by one entry: both of its blocks.
        (17, 4, 2, [3, 4]),  # The partial last block is within the window.
        (18, 1, 2, [1, 4]),  # It is not ranked, however little it holds.
        (16, 1, 2, [1, 3]),
        (16, 12, 3, [1, 2, 3]),
        (16, 13, 4, [0, 1, 2, 3]),
        (16, 40, 4, [0, 1, 2, 3]),  # Longer than the prompt.
        (3, 1, 1, [0]),
        (4, 1, 1, [0]),
    ],
)
def test_edges(count: int, window: int, num_blocks: int, expected: list[int]) -> None:
    centrality = torch.zeros(count)
    centrality[4:8] = 1.0
    assert kept(centrality, num_blocks, 4, window) == expected


@pytest.mark.parametrize("size", [16, 32, 33])
def test_equal_blocks_go_by_position(size: int, device: str) -> None:
    """The same numbers, which no float holds, in many blocks; sums must not differ by rounding."""
    rng = torch.Generator().manual_seed(size)
    equal = torch.rand(size, generator=rng).repeat(200)
    equal[150 * size] += 1.0
    centrality = torch.cat([equal, torch.zeros(3)]).to(device)
    for num_blocks in (1, 2, 17, 150, 151, 152, 200):
        expected = [150, *range(150), *range(151, 200)][: num_blocks - 1]
        assert kept(centrality, num_blocks, size, 3) == [*sorted(expected), 200]
