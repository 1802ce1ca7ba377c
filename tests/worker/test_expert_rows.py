"""For which numbers of rows experts run before a server is ready."""

from itertools import pairwise

import pytest

from vllm_kvx.worker.warm_up import expert_rows

# Between these vLLM's tiles do not change.
TILES = [96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]


@pytest.mark.parametrize("kinds", [[(128, 8)], [(4, 2)], [(60, 4), (15, 4)], [(64, 6)], []])
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


def test_a_step_has_no_more_rows() -> None:
    assert expert_rows(40, [(4, 2)]) == list(range(1, 41))
    assert max(expert_rows(512, [(4, 2)])) <= 512
