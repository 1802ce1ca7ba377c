"""Stored slots against a brute-force list of the positions that a policy keeps."""

import itertools

import numpy as np
import pytest

from vllm_kvx.accounting import NO_GAP, Gap, gap_of, kept_counts, stored_len, stored_lens
from vllm_kvx.policy.spec import KVPolicy, parse_policy
from vllm_kvx.policy.speed import Speed

CUTOFF = 3
PROMPT_LENS = range(1, 11)
LONGEST = 14
SHAPES = list(itertools.product(PROMPT_LENS, range(5), range(1, 5)))


def kept_positions(prompt_len: int, anchors: int, tail: int) -> list[int]:
    """Positions below LONGEST that SPEED stores above its cutoff, one by one."""
    prompt = list(range(prompt_len))
    return sorted({*prompt[:anchors], *prompt[-tail:], *range(prompt_len, LONGEST)})


@pytest.mark.parametrize(("prompt_len", "anchors", "tail"), SHAPES)
def test_speed_above_the_cutoff(prompt_len: int, anchors: int, tail: int) -> None:
    policy = KVPolicy(propagate=Speed(CUTOFF, anchors, tail))
    kept = kept_positions(prompt_len, anchors, tail)
    for layer in (CUTOFF, CUTOFF + 1):
        gap = gap_of(policy, prompt_len, layer)
        assert (gap == NO_GAP) == (prompt_len <= anchors + tail)
        for position in range(LONGEST):
            assert gap.is_kept(position) == (position in kept)
            slot = kept.index(position) if position in kept else None
            assert gap.slot(position) == slot
        for logical_len in range(LONGEST + 1):
            expected = sum(position < logical_len for position in kept)
            assert gap.stored_len(logical_len) == expected
            assert stored_len(policy, prompt_len, logical_len, layer, 16) == expected


@pytest.mark.parametrize("name", ["full", "speed-3", "fastkv:tsp_layer=1,kv_rate=1", "fier-64"])
def test_no_gap(name: str) -> None:
    policy = parse_policy(name)
    for prompt_len, layer, logical_len in itertools.product(range(1, 6), range(CUTOFF), range(8)):
        assert gap_of(policy, prompt_len, layer) is NO_GAP
        assert stored_len(policy, prompt_len, logical_len, layer, 16) == logical_len
        assert NO_GAP.slot(logical_len) == logical_len


def test_speed_composed_keeps_its_gap() -> None:
    assert gap_of(parse_policy("speed-3+fier-64"), 100, 3) == Gap(1, 98)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_equal_scalars(dtype: type[np.signedinteger]) -> None:
    gaps = [
        gap_of(KVPolicy(propagate=Speed(CUTOFF, anchors, tail)), prompt_len, CUTOFF)
        for prompt_len, anchors, tail in SHAPES
    ]
    starts = np.array([gap.start for gap in gaps], dtype=dtype)
    sizes = np.array([gap.size for gap in gaps], dtype=dtype)
    for begin, end in itertools.combinations_with_replacement(range(LONGEST + 1), 2):
        ends = np.full(len(gaps), end, dtype=dtype)
        stored = stored_lens(ends, starts, sizes)
        assert stored.dtype == dtype
        assert stored.tolist() == [gap.stored_len(end) for gap in gaps]
        kept = kept_counts(np.full_like(ends, begin), ends, starts, sizes)
        assert kept.tolist() == [sum(map(gap.is_kept, range(begin, end))) for gap in gaps]


def test_arrays_broadcast() -> None:
    lengths = np.arange(LONGEST)[:, None]
    stored = stored_lens(lengths, np.array([1, 0]), np.array([4, 0]))
    assert stored.shape == (LONGEST, 2)
    assert stored[:, 0].tolist() == [Gap(1, 4).stored_len(n) for n in range(LONGEST)]
    assert stored[:, 1].tolist() == list(range(LONGEST))
