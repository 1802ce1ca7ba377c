"""The counters of several engines, added up."""

import asyncio
from types import SimpleNamespace
from typing import Any

from vllm_kvx.server.engines import of_pipeline, read_stats, total

GROUPS = [{"layers": ["a", "b"], "block_size": 16, "segment": 0}]


def stats(tokens: int, recall: float | None, samples: int, **policies: Any) -> dict[str, Any]:
    return {
        "seconds_in_retention": 0.25,
        "stash_tokens": 100,
        "run_in_full": {"session": 1},
        "layout": {"groups": GROUPS, "num_blocks": 8, "pool_prompt_tokens": 64},
        "retrieval": {
            "ops": "torch",
            "policy": "fier-64",
            "dense_below": None,
            "auto": 65,
            "recall": recall,
            "recall_samples": samples,
        },
        "policies": {
            "full": {
                "prompt_tokens": tokens,
                "entries_retained_by_layer": [1, 2],
                "online_pivots": {"3": 1},
                "recall": None,
                "recall_samples": 0,
            },
            **policies,
        },
    }


def test_counts_add_up_and_settings_do_not() -> None:
    only = {"prompt_tokens": 5, "recall": 0.5, "recall_samples": 4}
    found = total([stats(10, 0.5, 30), stats(7, 1.0, 10, **{"fier-64": only})])
    assert found == {
        "engines": 2,
        "seconds_in_retention": 0.5,
        "stash_tokens": 200,
        "run_in_full": {"session": 2},
        "layout": {"groups": GROUPS, "num_blocks": 16, "pool_prompt_tokens": 128},
        "retrieval": {
            "ops": "torch",
            "policy": "fier-64",
            "dense_below": None,
            "auto": 65,
            "recall": 0.625,
            "recall_samples": 40,
        },
        "policies": {
            "full": {
                "prompt_tokens": 17,
                "entries_retained_by_layer": [2, 4],
                "online_pivots": {"3": 2},
                "recall": None,
                "recall_samples": 0,
            },
            "fier-64": only,
        },
    }


def test_one_that_measured_nothing_changes_no_mean() -> None:
    found = total([stats(1, None, 0), stats(1, 0.75, 4)])["retrieval"]
    assert (found["recall"], found["recall_samples"]) == (0.75, 4)


def test_all_engines_are_asked() -> None:
    """vLLM's own ``collective_rpc`` gives the first one's answer alone."""
    asked: list[tuple[Any, ...]] = []

    async def call_utility_all_async(*args: Any) -> list[list[dict[str, Any]]]:
        asked.append(args)
        return [[stats(3, None, 0), {"rank": 1}], [stats(4, None, 0), {"rank": 1}]]

    client: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(
                data_parallel_size=2, world_size=2, pipeline_parallel_size=1
            )
        ),
        engine_core=SimpleNamespace(call_utility_all_async=call_utility_all_async),
    )
    found = asyncio.run(read_stats(client))
    assert found["policies"]["full"]["prompt_tokens"] == 7
    assert asked == [("collective_rpc", "kv_policy_stats", None, (), None)]


def of_rank(layers: list[str], read: int, recall: float | None, samples: int) -> dict[str, Any]:
    """What a rank of a pipeline counts that has these layers."""
    return {
        "seconds_in_retention": 0.25,
        "stash_tokens": 100,
        "layout": {"groups": [{"layers": layers, "segment": 0}], "num_blocks": 8},
        "retrieval": {"ops": "torch", "auto": None, "recall": recall, "recall_samples": samples},
        "policies": {
            "fier-64": {
                "requests": 3,
                "entries_read": read,
                "entries_retained_by_layer": [read] * len(layers),
                "online_pivots": {},
                "recall": recall,
                "recall_samples": samples,
            }
        },
    }


def test_ranks_of_a_pipeline() -> None:
    """What is counted by layer adds up over them, and each knows all requests."""
    lower, upper = of_rank(["a", "b"], 10, None, 0), of_rank(["c"], 7, 0.5, 4)
    assert of_pipeline([lower, upper]) == {
        "seconds_in_retention": 0.5,
        "stash_tokens": 100,
        "layout": {"groups": [{"layers": ["a", "b", "c"], "segment": 0}], "num_blocks": 8},
        "retrieval": {"ops": "torch", "auto": None, "recall": 0.5, "recall_samples": 4},
        "policies": {
            "fier-64": {
                "requests": 3,
                "entries_read": 17,
                "entries_retained_by_layer": [10, 10, 7],
                "online_pivots": {},
                "recall": 0.5,
                "recall_samples": 4,
            }
        },
    }
    assert of_pipeline([lower]) == lower


def test_one_tensor_parallel_rank_speaks_for_its_stage() -> None:
    parallel = SimpleNamespace(data_parallel_size=1, world_size=4, pipeline_parallel_size=2)
    lower, upper = of_rank(["a"], 10, None, 0), of_rank(["b"], 7, 0.5, 4)

    async def collective_rpc(method: str) -> list[dict[str, Any]]:
        return [lower, {"rank": 1}, upper, {"rank": 3}]

    client: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel), collective_rpc=collective_rpc
    )
    found = asyncio.run(read_stats(client))
    assert found == of_pipeline([lower, upper]) | {"engines": 1}
