"""What a compiled draft model runs beside a full step."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from vllm_kvx.worker.draft_room import widen_compiled_range


def compiled(drafter: Any, graphs: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> Any:
    """A configuration of steps of 96 tokens, and 16 requests."""
    return SimpleNamespace(
        speculative_config=drafter,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=96, max_num_seqs=16),
        compilation_config=SimpleNamespace(
            compile_ranges_endpoints=[64, 96], cudagraph_mode=graphs
        ),
    )


@pytest.mark.parametrize("method, slots, end", [("draft_model", 1, 112), ("ngram", 0, 96)])
def test_the_last_range_has_room_for_drafts(method: str, slots: int, end: int) -> None:
    drafter = SimpleNamespace(method=method, max_num_new_slots_for_drafting=slots)
    config = compiled(drafter)
    widen_compiled_range(config)
    widen_compiled_range(config)
    assert config.compilation_config.compile_ranges_endpoints == [64, end]


def test_without_graphs_nothing_changes() -> None:
    drafter = SimpleNamespace(method="draft_model", max_num_new_slots_for_drafting=1)
    for config in (compiled(drafter, CUDAGraphMode.NONE), compiled(None)):
        widen_compiled_range(config)
        assert config.compilation_config.compile_ranges_endpoints == [64, 96]
