"""Stored slots against a brute-force list of the positions that a policy keeps."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from vllm_kvx.policy.axes import Propagate, ScoreSpec, Selection
from vllm_kvx.policy.methods.speed import Speed
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.storage import (
    NO_GAP,
    STASH_PAGE,
    Gap,
    Storage,
    gap_of,
    skipped_of,
    stash_pages,
    storage_of,
    stored_len,
    stored_lens,
)

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
            assert stored_len(policy, prompt_len, logical_len, layer, 16, 8) == expected


@pytest.mark.parametrize(
    "name", ["full", "speed-3", "fastkv:tsp_layer=1,kv_rate=1,kv_floor=0", "fier-64"]
)
def test_no_gap(name: str) -> None:
    policy = parse_policy(name)
    for prompt_len, layer, logical_len in itertools.product(range(1, 6), range(CUTOFF), range(8)):
        assert gap_of(policy, prompt_len, layer) is NO_GAP
        assert stored_len(policy, prompt_len, logical_len, layer, 16, 8) == logical_len
        assert NO_GAP.slot(logical_len) == logical_len


@pytest.mark.parametrize(("prompt_len", "anchors", "tail"), SHAPES)
def test_speed_in_layers_that_slide(prompt_len: int, anchors: int, tail: int) -> None:
    """Anchors until the tail comes, which takes their slots; no gap from there on."""
    policy = KVPolicy(propagate=Speed(CUTOFF, anchors, tail))
    storage = storage_of(policy, prompt_len, CUTOFF, 16, 8, slides=True)
    begin = max(prompt_len - tail, 0)
    first, most = list(range(min(anchors, begin))), 0
    for logical_len in range(LONGEST + 1):
        before = sum(position < logical_len for position in first)
        stored = before if logical_len <= begin else logical_len - begin
        most = max(most, stored)
        assert storage.stored_len(logical_len) == stored
        assert storage.peak_len(logical_len) == most
    assert storage.turn == (begin or None)
    assert storage.changes == bool(first)
    assert not storage.compacts
    for position in range(LONGEST):
        assert storage.prefill.is_kept(position) == (position in first or position >= begin)
        assert storage.decode.slot(position) == (position - begin if position >= begin else None)
    below = storage_of(policy, prompt_len, CUTOFF - 1, 16, 8, slides=True)
    assert below == storage_of(KVPolicy(), prompt_len, CUTOFF, 16, 8, slides=True)
    assert not below.changes and below.prefill == NO_GAP


def test_speed_composed_keeps_its_gap() -> None:
    assert gap_of(parse_policy("speed-3+fier-64"), 100, 3) == Gap(1, 98)


@pytest.mark.parametrize("layer", range(6))
def test_swiftkv_stores_all_and_runs_the_last_token(layer: int) -> None:
    policy = parse_policy("swiftkv-3")
    for prompt_len in range(1, 6):
        storage = storage_of(policy, prompt_len, layer, 16, 6)
        assert not storage.changes and storage.kept == storage.rows == prompt_len
        assert [storage.peak_len(n) for n in range(8)] == list(range(8))
        skipped = skipped_of(policy, prompt_len, layer)
        runs = [skipped.is_kept(position) for position in range(8)]
        assert runs == [layer < 3 or position >= prompt_len - 1 for position in range(8)]
    assert policy.projects_from == 3


@pytest.mark.parametrize(("prompt_len", "anchors"), itertools.product(PROMPT_LENS, range(5)))
def test_selfonly_above_the_cutoff(prompt_len: int, anchors: int) -> None:
    """Anchors and, from the last prompt token on, the newest token, which takes the same slot."""
    policy = parse_policy(f"selfonly-3:anchors={anchors}")
    shared = list(range(min(anchors, prompt_len)))
    for layer in (CUTOFF, CUTOFF + 1):
        storage = storage_of(policy, prompt_len, layer, 16, 8)
        assert not storage.changes
        for logical_len in range(LONGEST + 1):
            held = {position for position in shared if position < logical_len}
            if logical_len >= prompt_len:
                held.add(logical_len - 1)
            assert storage.stored_len(logical_len) == storage.peak_len(logical_len) == len(held)
        gap = storage.prefill
        for position in range(LONGEST):
            runs = position in shared or position >= prompt_len - 1
            slot = min(position, len(shared)) if runs else None
            assert (gap.is_kept(position), gap.slot(position)) == (runs, slot)
    assert storage_of(policy, prompt_len, CUTOFF - 1, 16, 8).prefill == NO_GAP


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
        kept = stored - stored_lens(np.full_like(ends, begin), starts, sizes)
        assert kept.tolist() == [sum(map(gap.is_kept, range(begin, end))) for gap in gaps]


def test_arrays_broadcast() -> None:
    lengths = np.arange(LONGEST)[:, None]
    stored = stored_lens(lengths, np.array([1, 0]), np.array([4, 0]))
    assert stored.shape == (LONGEST, 2)
    assert stored[:, 0].tolist() == [Gap(1, 4).stored_len(n) for n in range(LONGEST)]
    assert stored[:, 1].tolist() == list(range(LONGEST))


BLOCKS = "structkv:pivot=3,kv_floor=0,granularity=block"


def stored_of(name: str, prompt_len: int, layer: int, block_size: int) -> tuple[int, int]:
    """Entries before and after retention."""
    storage = storage_of(parse_policy(name), prompt_len, layer, block_size, 8)
    assert storage.stored_len(prompt_len + 5) == storage.kept + 5
    assert storage.peak_len(prompt_len) == storage.rows
    return storage.rows, storage.kept


@pytest.mark.parametrize(
    ("rates", "prompt_len", "lower", "upper"),
    [
        ("", 8, (8, 8), (8, 8)),  # No longer than the window.
        ("", 32, (32, 32), (8, 8)),  # One block is the least.
        ("", 33, (33, 33), (8, 8)),  # The window is in both.
        ("", 39, (39, 39), (8, 8)),
        ("", 40, (40, 8), (8, 8)),  # It begins with the second block.
        ("", 41, (41, 9), (8, 8)),
        ("", 64, (64, 32), (12, 12)),
        ("", 71, (71, 39), (14, 14)),
        ("", 72, (72, 8), (14, 14)),
        ("", 320, (320, 32), (64, 32)),  # A tenth is one block,
        ("", 321, (321, 33), (64, 64)),  # and now a bit more; its window is in two as well.
        ("", 351, (351, 63), (70, 38)),
        ("", 352, (352, 64), (70, 38)),
        ("", 640, (640, 64), (128, 64)),
        ("", 650, (650, 74), (130, 66)),
        (",struct_rate=1", 650, (650, 74), (650, 74)),
        (",kv_rate=1", 650, (650, 650), (130, 130)),
        (",kv_rate=0.5", 650, (650, 330), (130, 130)),  # 11 of 21 blocks, of 5 all.
        (",window=64", 64, (64, 64), (64, 64)),
        (",window=64", 96, (96, 64), (64, 64)),
        (",window=64", 97, (97, 65), (64, 64)),
        (",window=1", 33, (33, 1), (6, 6)),
    ],
)
def test_whole_blocks(
    rates: str, prompt_len: int, lower: tuple[int, int], upper: tuple[int, int]
) -> None:
    assert stored_of(BLOCKS + rates, prompt_len, 0, 32) == lower
    assert stored_of(BLOCKS + rates, prompt_len, 4, 32) == upper


def whole_blocks(rows: int, most: Fraction, window: int, block_size: int) -> int:
    """Entries left of `rows` once the lowest blocks that may go have gone, one by one."""
    blocks = [range(first, min(first + block_size, rows)) for first in range(0, rows, block_size)]
    while len(blocks) - 1 >= most / block_size and blocks[0].stop <= rows - window:
        blocks.pop(0)
    return sum(map(len, blocks))


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("window", [1, 8, 24, 64])
@pytest.mark.parametrize("kv_rate", ["0.125", "0.5", "0.75"])
def test_whole_blocks_one_by_one(block_size: int, window: int, kv_rate: str) -> None:
    """Rates that floats hold: no count hangs on their rounding."""
    name = f"{BLOCKS},struct_rate=0.25,kv_rate={kv_rate},window={window}"
    for prompt_len in range(1, 400):
        most = prompt_len * Fraction(kv_rate)
        selected = min(max(prompt_len // 4, window), prompt_len)
        for layer, rows in ((0, prompt_len), (4, selected)):
            kept = whole_blocks(rows, most, window, block_size)
            assert stored_of(name, prompt_len, layer, block_size) == (rows, kept)


@pytest.mark.parametrize("prompt_len", [2, 3, 40, 320, 650])
def test_whole_blocks_below_a_cutoff(prompt_len: int) -> None:
    """SPEED's own segment keeps its anchors and tail, which no retention touches."""
    name = f"speed-6+{BLOCKS},struct_rate=1"
    below = stored_of(BLOCKS, prompt_len, 0, 32)
    assert stored_of(name, prompt_len, 0, 32) == stored_of(name, prompt_len, 4, 32) == below
    assert stored_of(name, prompt_len, 6, 32) == (2, 2)
    above = storage_of(parse_policy(name), prompt_len, 6, 32, 8)
    assert not above.compacts and not above.changes


class Restarts(Propagate):
    """Layers 0 to 2 choose ten tokens, which then run again from the embedding."""

    name = "restarts"

    def selection(self, prompt_len: int, num_layers: int) -> Selection:
        return Selection(ScoreSpec("window_attention", window=8), 10, after=2, resumes_at=0)


@pytest.mark.parametrize(
    ("name", "layer", "storage"),
    [
        ("full", 0, Storage(100, NO_GAP, 100, NO_GAP)),
        ("speed-4", 3, Storage(100, NO_GAP, 100, NO_GAP)),
        ("speed-4", 4, Storage(100, Gap(1, 98), 2, Gap(1, 98))),
        ("speed-4:anchors=0,tail=99", 4, Storage(100, Gap(0, 1), 99, Gap(0, 1))),
        ("speed-4:anchors=1,tail=99", 4, Storage(100, NO_GAP, 100, NO_GAP)),
        ("snapkv:kv_rate=0.5,kv_floor=0", 0, Storage(100, NO_GAP, 100, Gap(50, 50))),
        ("fastkv:kv_floor=0,tsp_layer=3", 3, Storage(100, NO_GAP, 100, Gap(10, 90))),
        ("fastkv:kv_floor=0,tsp_layer=3", 4, Storage(100, Gap(0, 100), 20, Gap(10, 90))),
        ("fastkv:tsp_layer=3,kv_rate=1,kv_floor=0", 3, Storage(100, NO_GAP, 100, NO_GAP)),
        ("fastkv:tsp_layer=3,kv_rate=1,kv_floor=0", 4, Storage(100, Gap(0, 100), 20, Gap(20, 80))),
        ("snapkv:kv_floor=33", 0, Storage(100, NO_GAP, 100, Gap(33, 67))),
        ("snapkv:kv_floor=400", 0, Storage(100, NO_GAP, 100, NO_GAP)),
        # Of what is drafted nothing stays; where all of the prompt does, nothing is drafted.
        ("snapkv:kv_floor=33,lookahead=9", 0, Storage(100, NO_GAP, 109, Gap(33, 67))),
        ("snapkv:kv_floor=100,lookahead=9", 0, Storage(100, NO_GAP, 100, NO_GAP)),
        ("pyramidkv:kv_rate=0.6,kv_floor=0,lookahead=9", 0, Storage(100, NO_GAP, 109, NO_GAP)),
        ("fastkv:tsp_layer=3,kv_floor=33", 3, Storage(100, NO_GAP, 100, Gap(33, 67))),
        ("fastkv:tsp_layer=3,kv_floor=33", 4, Storage(100, Gap(0, 100), 33, Gap(33, 67))),
        (
            "fastkv:tsp_layer=3,kv_floor=33,tsp_floor=0",
            4,
            Storage(100, Gap(0, 100), 20, Gap(20, 80)),
        ),
        (
            "fastkv:tsp_layer=3,kv_floor=0,tsp_floor=25",
            4,
            Storage(100, Gap(0, 100), 25, Gap(10, 90)),
        ),
        ("fastkv:tsp_layer=3,kv_budget=15", 4, Storage(100, NO_GAP, 100, Gap(15, 85))),
        ("pyramidkv:groups=1,kv_floor=33", 0, Storage(100, NO_GAP, 100, Gap(33, 67))),
        ("criticalkv:kv_floor=33", 0, Storage(100, NO_GAP, 100, Gap(33, 67))),
        ("knorm:kv_floor=33", 0, Storage(100, NO_GAP, 100, Gap(33, 67))),
        ("streamingllm:kv_rate=0.2,kv_floor=0", 0, Storage(100, NO_GAP, 100, Gap(20, 80))),
        ("streamingllm:kv_rate=0.2,kv_floor=33", 0, Storage(100, NO_GAP, 100, Gap(33, 67))),
        ("streamingllm:sinks=30,kv_rate=0.2,kv_floor=0", 0, Storage(100, NO_GAP, 100, Gap(31, 69))),
        ("streamingllm:sinks=100,kv_rate=0.2,kv_floor=0", 0, Storage(100, NO_GAP, 100, NO_GAP)),
        ("gemfilter:layer=2,kv_floor=33", 2, Storage(100, NO_GAP, 100, Gap(33, 67))),
        ("structkv:pivot=3,kv_floor=33", 3, Storage(100, NO_GAP, 100, Gap(33, 67))),
        ("structkv:pivot=3,struct_floor=0,kv_budget=15", 3, Storage(100, NO_GAP, 100, Gap(15, 85))),
        (
            "structkv:pivot=3,struct_floor=0,kv_budget=15",
            4,
            Storage(100, Gap(0, 100), 20, Gap(15, 85)),
        ),
        # Blocks of 16: three of seven, the last of 4.
        (
            "structkv:pivot=3,granularity=block,kv_floor=33",
            3,
            Storage(100, NO_GAP, 100, Gap(36, 64)),
        ),
        (
            "structkv:pivot=3,granularity=block,kv_budget=48",
            3,
            Storage(100, NO_GAP, 100, Gap(36, 64)),
        ),
        (
            "structkv:pivot=3,granularity=block,kv_budget=49",
            3,
            Storage(100, NO_GAP, 100, Gap(52, 48)),
        ),
        # Above the pivot no more than 20 exist, wherever it is.
        ("structkv:pivot=online,kv_floor=33", 0, Storage(100, NO_GAP, 100, Gap(33, 67))),
        (
            "structkv:pivot=online,kv_floor=33,struct_floor=0",
            0,
            Storage(100, NO_GAP, 100, Gap(20, 80)),
        ),
        (
            "structkv:pivot=online,struct_floor=0,kv_budget=33",
            7,
            Storage(100, NO_GAP, 100, Gap(20, 80)),
        ),
        # Any layer may run every token.
        ("structkv:pivot=online,kv_floor=0,max_layer=5", 7, Storage(100, NO_GAP, 100, Gap(10, 90))),
        ("speed-4+snapkv:kv_rate=0.5,kv_floor=0", 3, Storage(100, NO_GAP, 100, Gap(50, 50))),
        ("speed-4+snapkv:kv_rate=0.5,kv_floor=0", 4, Storage(100, Gap(1, 98), 2, Gap(1, 98))),
        # The layers that choose hold every token until then, the others none.
        ("restarts", 2, Storage(100, NO_GAP, 100, Gap(10, 90))),
        ("restarts", 3, Storage(100, Gap(0, 100), 10, Gap(10, 90))),
    ],
)
def test_storage_by_hand(name: str, layer: int, storage: Storage) -> None:
    restarts = KVPolicy(propagate=Restarts())
    policy = restarts if name == "restarts" else parse_policy(name)
    found = storage_of(policy, 100, layer, 16, 8)
    assert found == storage
    kept = 100 - storage.decode.size
    assert found.kept == found.stored_len(100) == kept and found.peak_len(100) == storage.rows
    assert found.stored_len(101) == kept + 1
    assert found.peak_len(101) == max(kept + 1, storage.rows)
    before = 99 - min(storage.prefill.size, 99 - storage.prefill.start)
    assert found.stored_len(99) == found.peak_len(99) == before
    assert found.compacts == (kept < storage.rows)
    # Tokens that are chosen appear all at once: a change too, though nothing goes.
    assert found.changes == (found.compacts or storage.prefill.size == 100)


@pytest.mark.parametrize(
    ("name", "rows", "kept"),
    [
        ("fastkv:tsp_layer=3,kv_floor=0,after=4", (100, 20), (10, 10)),
        ("fastkv:tsp_layer=3,kv_floor=0,kv_rate=0.3,after=4", (100, 20), (30, 20)),
        ("fastkv:tsp_layer=3,kv_rate=1,kv_floor=0+snapkv:kv_floor=15,after=4", (100, 20), (15, 15)),
        ("structkv:pivot=3,struct_floor=40,kv_floor=0,after=4", (100, 40), (10, 10)),
    ],
)
def test_tokens_go_on_before_retention_has_what_it_waits_for(
    name: str, rows: tuple[int, int], kept: tuple[int, int]
) -> None:
    """Entries by stage: none above the cut until the prompt is in, the chosen ones from then on."""
    for layer, computed, stay in zip((3, 4), rows, kept, strict=True):
        storage = storage_of(parse_policy(name), 100, layer, 16, 8)
        below = 99 if layer == 3 else 0
        wanted = [below, computed, computed + 3, stay + 4, stay + 14]
        assert [storage.stored_len(n) for n in (99, 100, 103, 104, 114)] == wanted
        peaks = [below, computed, computed + 3, computed + 4, max(stay + 14, computed + 4)]
        assert [storage.peak_len(n) for n in (99, 100, 103, 104, 114)] == peaks
        assert storage.compacts == (stay < computed)
        first, then = storage.until_chosen, storage.once_chosen
        assert (first.settles_at, first.kept, first.compacts) == (100, computed, False)
        assert (then.settles_at, then.kept, then.compacts) == (104, stay + 4, storage.compacts)
        assert first.decode == then.prefill


def test_a_gap_that_moves_is_a_change() -> None:
    moved = Storage(10, Gap(0, 4), 6, Gap(6, 4))
    assert moved.changes and not moved.compacts
    assert not Storage(10).changes and not Storage(10).compacts


def test_a_stash_page_that_is_not_full_is_taken() -> None:
    for num_tokens, pages in ((0, 0), (1, 1), (STASH_PAGE, 1), (STASH_PAGE + 1, 2)):
        assert stash_pages(num_tokens) == pages
