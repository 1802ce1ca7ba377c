"""For which numbers of rows experts run before a server is ready."""

from collections.abc import Iterable
from itertools import pairwise

import pytest

from vllm_kvx.worker.warm_up import expert_rows

# Between these vLLM's tiles do not change.
TILES = [96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]


@pytest.mark.parametrize("kinds", [[(128, 8)], [(4, 2)], [(60, 4), (15, 4)], [(64, 6)], [(1, 1)]])
def test_every_kernel_has_rows(kinds: list[tuple[int, int]]) -> None:
    """Sizes that Triton tells apart, multiples of 16 or none, are met with each of the tiles."""
    rows = expert_rows(8192, kinds)
    assert rows[:96] == list(range(1, 97)) and rows[-1] <= 8192 and rows == sorted(set(rows))

    def met(counts: list[int]) -> set[tuple[bool, ...]]:
        return {
            tuple(
                size % 16 == 0
                for experts, taken in kinds
                # Tiles of 16 rows and more leave room for 15 more of an expert, by this measure.
                for size in (count * taken, count * taken + 15 * experts)
            )
            for count in counts
        }

    for first, last in pairwise(TILES):
        within = [count for count in rows if first < count <= last]
        assert met(within) == met(list(range(first + 1, last + 1))), (first, last)


@pytest.mark.parametrize("most", [1536, 2048, 3072, 4096, 5000])
def test_the_last_tile_has_rows(most: int) -> None:
    """vLLM's tables go by the nearest of their numbers of rows: 3,585 rows run by the tile of
    4,096, though no limit lies between them and the most."""
    keys = [512, 1024, 1536, 2048, 3072, 4096]

    def ran(counts: Iterable[int]) -> set[tuple[int, bool, bool]]:
        return {
            (min(keys, key=lambda key: abs(key - n)), 2 * n % 16 == 0, (2 * n - 4) % 16 == 0)
            for n in counts
        }

    assert ran(expert_rows(most, [(4, 2)])) == ran(range(1, most + 1))


def test_a_step_has_no_more_rows() -> None:
    assert expert_rows(40, [(4, 2)]) == list(range(1, 41))
    assert max(expert_rows(512, [(4, 2)])) <= 512
