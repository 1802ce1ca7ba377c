"""Whether a compacted prompt may stay in the cache, beside what others take in the same step."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kvx.cache.step_room import StepRoom

PROMPT, KEPT, MAX_TOKENS = 128, 64, 256


def room_of(
    block_sizes: list[int], free: int, other: Any = None, of_other: int = 0
) -> tuple[StepRoom, Any]:
    """Of a server whose first group follows policies; and what its request keeps.

    other: what another request `b` stores; of_other: blocks that one takes where it ends.
    """
    kv = SimpleNamespace(
        reads=True,
        compacts_at=lambda end: end == PROMPT,
        storage=SimpleNamespace(kept=KEPT, settles_at=PROMPT),
        moves_out=None,
    )
    manager: Any = SimpleNamespace(
        requests={"a": kv, "b": SimpleNamespace(storage=other)},
        block_size=block_sizes[0],
        num_blocks_to_end=lambda name: of_other if name == "b" else 0,
    )
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=n)) for n in block_sizes]
    blocks: Any = SimpleNamespace(
        block_pool=SimpleNamespace(get_num_free_blocks=lambda: free),
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
        enable_caching=True,
        watermark_blocks=0,
    )
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=256))
    return StepRoom([manager], blocks, config), kv


@pytest.mark.parametrize("block_sizes", [[64], [64, 16], [16, 64], [64, 16, 16]])
def test_room_for_what_others_take(block_sizes: list[int]) -> None:
    """One prompt of another request may fill the step, in blocks of each group's own size."""
    least = -(-KEPT // block_sizes[0]) + sum(1 + MAX_TOKENS // size for size in block_sizes)
    request: Any = SimpleNamespace(request_id="a", num_prompt_tokens=PROMPT)
    for free, moves_out in ((least, True), (least - 1, False)):
        room, kv = room_of(block_sizes, free)
        room.choose(request, PROMPT, ())
        assert kv.moves_out is moves_out


@pytest.mark.parametrize(
    ("chosen_at", "settles_at", "ends"),
    [
        # It waits for generated tokens, more than a step has: its prompt's end is what counts.
        (200, 600, True),
        (200 + MAX_TOKENS, 600, False),
        (100, 600, False),
        # Nothing is chosen before, or both are near.
        (None, 600, False),
        (None, 200, True),
        (200, 232, True),
    ],
)
def test_room_for_another_prompt_whose_tokens_are_chosen(
    chosen_at: int | None, settles_at: int, ends: bool
) -> None:
    """Entries of a request with `after=` go twice: above a choice, and when it has settled."""
    size, of_other = 64, 5
    other = SimpleNamespace(chosen_at=chosen_at, settles_at=settles_at)
    a: Any = SimpleNamespace(request_id="a", num_computed_tokens=0)
    b: Any = SimpleNamespace(request_id="b", num_computed_tokens=100)
    # Each of both may begin a block, beside what a whole step fills.
    least = KEPT // size + 2 + MAX_TOKENS // size + of_other * ends
    for free, moves_out in ((least, True), (least - 1, False)):
        room, kv = room_of([size], free, other, of_other)
        room.choose(a, PROMPT, (b,))
        assert kv.moves_out is moves_out
