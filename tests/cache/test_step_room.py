"""Whether a compacted prompt may stay in the cache, where blocks of KV groups differ in size."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kvx.cache.step_room import StepRoom

PROMPT, KEPT, MAX_TOKENS = 128, 64, 256


def room_of(block_sizes: list[int], free: int) -> tuple[StepRoom, Any]:
    """Of a server whose first group follows policies; and what its request keeps."""
    kv = SimpleNamespace(
        reads=True,
        compacts_at=lambda end: end == PROMPT,
        storage=SimpleNamespace(kept=KEPT, settles_at=PROMPT),
        moves_out=None,
    )
    manager: Any = SimpleNamespace(
        requests={"a": kv}, block_size=block_sizes[0], num_blocks_to_end=lambda name: 0
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
