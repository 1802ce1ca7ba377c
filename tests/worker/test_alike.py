"""Which ranks plan retrieval unlike each other, and what they are told."""

from dataclasses import replace
from typing import Any

import pytest

from vllm_kvx.ops.retrieval.costs import COSTS, ONE_LAUNCH, StepCosts
from vllm_kvx.worker.decode.alike import RankPlan, unlike

THREE = StepCosts(COSTS["cuda"][8, 256])
ONE = StepCosts(COSTS["cuda"][8, 256], ONE_LAUNCH[8, 256], 4)
SMALL, LARGE = (8, 2, 64), (8, 4, 64)
AUTO, FP8, BOTH = (None, 256, ("auto",)), (None, 128, ("fp8",)), (None, 256, ("auto", "fp8"))


def plan(
    rank: int, heads: Any = LARGE, ops: str = "cuda", costs: StepCosts = ONE, layers: Any = AUTO
) -> RankPlan:
    who, lengths = (rank, f"node-{rank // 2}"), (16384, costs)
    return RankPlan(*who, heads, layers, (ops, ops), lengths, f"by {ops}")


def test_ranks_that_plan_alike_are_told_nothing() -> None:
    # As they come from other processes: equal, not the same.
    assert not unlike([plan(rank, costs=replace(ONE)) for rank in range(4)])


def test_ranks_of_a_pipeline_may_have_other_layers() -> None:
    """Whose lengths follow from their heads and bytes."""
    assert not unlike([plan(0, SMALL, costs=THREE), plan(1, SMALL, costs=THREE), plan(2), plan(3)])


@pytest.mark.parametrize("others", [FP8, BOTH])
def test_layers_of_a_pipeline_that_skip_a_quantized_cache(others: Any) -> None:
    """Lengths differ with them, and operators may not."""
    first = [plan(0), plan(1)]
    assert not unlike([*first, plan(2, costs=THREE, layers=others)])
    told = unlike([*first, plan(2, ops="triton", costs=THREE, layers=others)])
    assert "- rank 2 on node-1: by triton" in told.splitlines()


@pytest.mark.parametrize(
    "other",
    [
        {"ops": "triton"},
        # One launch is off there.
        {"costs": THREE},
        # It does fewer rows there: lengths may be alike, and steps of three rows are not.
        {"costs": replace(ONE, few_rows=2)},
    ],
)
def test_ranks_that_differ_are_named(other: dict[str, Any]) -> None:
    told = unlike([plan(0), plan(1), plan(2, **other), plan(3, **other), plan(4, SMALL)])
    by = other.get("ops", "cuda")
    assert "- rank 0 on node-0, rank 1 on node-0: by cuda" in told.splitlines()
    assert f"- rank 2 on node-1, rank 3 on node-1: by {by}" in told.splitlines()
    assert "rank 4" not in told
    assert "Set KVX_RETRIEVAL_OPS and KVX_RETRIEVAL_ONE_LAUNCH to the same values" in told
