"""Room for scores."""

import pytest

from vllm_kvx.worker.decode.room import MAX_SCORE_BYTES, SCORE_SHARE, capacity_of


@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
@pytest.mark.parametrize("longest", [2304, 131072, 1 << 20])
def test_capacity(longest: int, kv_heads: int, unit: int) -> None:
    num_bytes = 100 << 20
    units = capacity_of(256, longest, unit, kv_heads, num_bytes)
    # Vector loads want rows of scores that begin at multiples of four.
    assert units % 4 == 0 and 2 * longest // unit <= units <= 256 * longest // unit
    fits = units * unit * kv_heads * 4 <= num_bytes
    assert fits or units == 2 * longest // unit


def test_all_there_can_be() -> None:
    assert capacity_of(8, 2301, 1, 8, MAX_SCORE_BYTES) == 8 * 2304
    assert capacity_of(1, 1 << 20, 1, 8, 0) == 1 << 20


def test_of_a_whole_pool() -> None:
    """Llama-3.1-8B on an H200: several times 862,496 (benchmarks/results/engine/h200-fier.json)."""
    memory = int((140 << 30) * SCORE_SHARE)
    assert capacity_of(256, 131072, 1, 8, memory) > 4 * 862_496


def test_drafted_tokens_have_scores_of_their_own() -> None:
    """Each of a request's rows does; where a choice is read again, whatever fitted before."""
    longest, memory = 131072, 256 << 20
    assert capacity_of(1, longest, 1, 8, memory, 4) == 5 * longest
    assert capacity_of(6, longest, 1, 8, 140 << 20, 4) >= 6 * 5 * 130_000
    assert capacity_of(256, longest, 1, 8, memory, 4) == 2 * capacity_of(256, longest, 1, 8, memory)
    for requests, num_bytes in ((1, memory), (256, memory), (256, 0)):
        alone = capacity_of(requests, longest, 1, 8, num_bytes)
        assert capacity_of(requests, longest, 1, 8, num_bytes, 4, at_once=True) == 5 * alone
