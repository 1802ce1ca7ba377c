"""The metrics themselves: names, labels, how many series, and that no total falls or doubles."""

import math
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm import SamplingParams

from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.counted import MAX_POLICIES, OTHER, CountedPolicies
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.server import metrics
from vllm_kvx.server import refusal_reasons as refused
from vllm_kvx.server.metrics import PolicyMetrics
from vllm_kvx.server.refusal_reasons import Reason
from vllm_kvx.server.request_check import check_request
from vllm_kvx.worker.stats import PolicyStats

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "operations.md"
LAYERS = 8
# A server's own, and more than it keeps apart besides.
OWN = ["speed-4", "fier-64", "full"]
ODD = [f"speed-4:anchors={a},tail={t}" for a in range(2, 27) for t in range(2, 22)]


def server(model: str, *own: str) -> PolicyMetrics:
    return PolicyMetrics(model, own[0], CountedPolicies(own))


def sample(name: str, model: str, **labels: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(
        f"vllm_kvx:{name}", {"model_name": model, **labels}
    )


def told(**policies: dict[str, Any]) -> dict[str, Any]:
    return {"policies": policies}


# Names.


def test_the_page_has_every_metric() -> None:
    """Name, kind and labels; of those that vLLM's own label is on too."""
    row = re.compile(
        r"^\| `vllm_kvx:(\w+)` \| (\w+) \| ([^|]*) \| [^|]+ \| [^|]+ \|$", re.MULTILINE
    )
    page = [
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in row.findall(PAGE.read_text())
    ]
    exported = [
        (metric.name, kind, metric.labels[1:])
        for kind, all_of_kind in (
            ("counter", metrics.ALL_COUNTERS),
            ("gauge", metrics.ALL_GAUGES),
        )
        for metric in all_of_kind
    ]
    assert sorted(page) == sorted(exported)
    assert all(m.labels[0] == "model_name" for m in metrics.ALL_COUNTERS + metrics.ALL_GAUGES)
    mentioned = set(re.findall(r"vllm_kvx:(\w+)", PAGE.read_text()))
    names = {m.name for m in metrics.ALL_GAUGES}
    names |= {f"{m.name}{end}" for m in metrics.ALL_COUNTERS for end in ("", "_total")}
    assert mentioned <= names, "the page has alerts on what there is not"
    reasons = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert set(Reason) <= set(reasons)


# How many there are.


def test_rows_of_a_servers_own_policies_are_kept() -> None:
    """The worker's counters, with 500 policies of clients before the server's own come."""
    assert len(ODD) == 500
    stats = PolicyStats((4, 4), CountedPolicies(OWN))
    for name in ODD:
        stats.requests[stats.row_of(parse_policy(name))] += 1
    # What the scheduler counts may name others again.
    stats.scheduler = {"unshared": dict.fromkeys([*ODD, "speed-4", OTHER], 1)}
    for name in OWN:
        stats.requests[stats.row_of(parse_policy(name))] += 1
    counters = stats.as_dict()
    assert list(counters) == [*OWN, *ODD[:MAX_POLICIES], OTHER]
    assert [counters[name]["requests"] for name in OWN] == [1, 1, 1]
    assert counters[OTHER]["requests"] == 500 - MAX_POLICIES
    assert counters[OTHER]["prefix_not_shared"] == 500 - MAX_POLICIES + 1
    assert sum(c["prefix_not_shared"] for c in counters.values()) == 502
    row = stats.row_of(parse_policy(ODD[-1]))
    assert np.shape(stats.entries_kept)[0] == row + 1 == len(OWN) + MAX_POLICIES + 1


def test_series_are_bounded() -> None:
    """500 policies, each with totals in every layer, as a scrape sees them."""
    own = server("many", *OWN)
    stats = PolicyStats((4, 4), CountedPolicies(OWN))
    for turn in range(1, 4):
        for name in ODD:
            row = stats.row_of(parse_policy(name))
            stats.requests[row] += 1
            stats.entries_kept[row] += 1
            stats.entries_computed[row] += 2
            stats.pivots[row] = {layer: turn for layer in range(LAYERS)}
        totals = stats.as_dict()
        stats.scheduler = {"held": dict.fromkeys(totals, turn)}
        for values in totals.values():
            values |= {"recall": 0.5, "recall_samples": turn}
        own.update({"policies": totals | {f"late-{turn}-{i}": {"requests": 1} for i in range(99)}})
    text = prometheus_client.generate_latest().decode()
    series: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            if each.labels.get("model_name") == "many":
                series[each.name] = series.get(each.name, 0) + 1
    rows = len(OWN) + MAX_POLICIES + 1
    assert series["vllm_kvx:requests_total"] == series["vllm_kvx:kv_blocks_held"] == rows
    assert series["vllm_kvx:online_pivots_total"] == (MAX_POLICIES + 1) * LAYERS
    assert series["vllm_kvx:retrieval_recall"] <= rows
    by_layer = {name: n for name, n in series.items() if n > rows}
    assert all(n <= rows * LAYERS for n in by_layer.values()) and len(by_layer) <= 4
    assert sample("requests_total", "many", policy=ODD[0]) == 3
    assert sample("requests_total", "many", policy=OTHER) == 3 * (500 - MAX_POLICIES + 99)


# What they say.


def test_counters_never_fall() -> None:
    own = server("monotonic", "speed-4")
    seen = []
    for total in (5, 9, 9, 2, 3):
        layers = {"online_pivots": {"5": total}, "seconds_in_retention": total / 4}
        own.update(told(**{"speed-4": {"layer_tokens_skipped": total, **layers}}))
        moved = [
            sample("layer_tokens_skipped_total", "monotonic", policy="speed-4"),
            sample("online_pivots_total", "monotonic", policy="speed-4", layer="5"),
            4 * (sample("retention_seconds_total", "monotonic", policy="speed-4") or 0),
        ]
        assert moved == [moved[0]] * 3
        seen.append(moved[0])
    assert seen == [5, 9, 9, 11, 12]


def test_blocks_are_nobodys_once_a_policy_is_gone() -> None:
    """An engine that starts anew knows none of the policies of the one before."""
    own = server("gone", "speed-4")
    own.update(told(**{"speed-4:tail=2": {"blocks_held": 7, "blocks_saved": 3}}))
    assert sample("kv_blocks_held", "gone", policy="speed-4:tail=2") == 7
    own.update(told(**{"speed-4": {"blocks_held": 1}}))
    assert sample("kv_blocks_held", "gone", policy="speed-4:tail=2") == 0
    assert sample("kv_blocks_saved", "gone", policy="speed-4:tail=2") == 0
    assert sample("kv_blocks_held", "gone", policy="speed-4") == 1


def test_what_is_the_servers_says_so() -> None:
    own = server("own", "fier-64")
    ops = {"score_ops": "triton", "attend_ops": "cuda", "ops_reason": "because"}
    retrieval = {**ops, "auto": None, "dense_below": 65, "seconds_in_sidecar_writes": 1.5}
    retrieval |= {"dense_below_batch": 66, "dense_below_one": 67}
    stats = {"stash_waits": 2, "stash_wait_seconds": 0.5, "stash_tokens": 640}
    stats |= {"run_in_full": {"session": 3, "misfit": 0}}
    assert sample("counters_updated_timestamp_seconds", "own", server_policy="fier-64") == 0
    for _ in range(2):
        own.update({**stats, "retrieval": retrieval})
    ours = {"server_policy": "fier-64"}
    assert sample("stash_waits_total", "own", **ours) == 2
    assert sample("stash_wait_seconds_total", "own", **ours) == 0.5
    assert sample("stash_tokens", "own", **ours) == 640
    assert sample("sidecar_write_seconds_total", "own", **ours) == 1.5
    assert sample("retrieval_crossover_tokens", "own", **ours) == math.inf
    assert sample("retrieval_dense_below_tokens", "own", **ours) == 65
    assert sample("retrieval_dense_below_batch_tokens", "own", **ours) == 66
    assert sample("retrieval_dense_below_one_tokens", "own", **ours) == 67
    assert sample("requests_run_in_full_total", "own", reason="session") == 3
    assert sample("requests_run_in_full_total", "own", reason="misfit") == 0
    triton = {**ours, "score": "triton", "attend": "cuda", "reason": "because"}
    assert sample("retrieval_ops_info", "own", **triton) == 1
    own.update({"retrieval": retrieval | {"score_ops": "cuda", "dense_below_one": None}})
    assert sample("retrieval_dense_below_one_tokens", "own", **ours) == math.inf
    assert sample("retrieval_ops_info", "own", **triton) == 0
    assert sample("retrieval_ops_info", "own", **(triton | {"score": "cuda"})) == 1
    updated = sample("counters_updated_timestamp_seconds", "own", **ours)
    assert updated is not None and time.time() - 60 < updated <= time.time()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"extra_args": {"kv_polcy": "full"}}, Reason.MISSPELLED_KEY),
        ({"extra_args": {"kv_policy": 4}}, Reason.NOT_A_STRING),
        ({"extra_args": {"kv_policy": "sped-4"}}, Reason.MALFORMED),
        ({"extra_args": {"kv_policy": "speed-4:tail=0"}}, Reason.MALFORMED),
        (
            {"extra_args": {"kv_policy": "fastkv:kv_floor=0,tsp_layer=3+streamingllm:recent=1020"}},
            Reason.MALFORMED,
        ),
        (
            {
                "extra_args": {
                    "kv_policy": "fastkv:tsp_layer=3,kv_rate=1,kv_floor=0+streamingllm:recent=1020"
                }
            },
            Reason.NOT_SERVED,
        ),
        ({"extra_args": {"kv_policy": "speed-8"}}, Reason.NOT_FOR_MODEL),
        ({"extra_args": {"kv_policy": "speed-5"}}, Reason.NO_ROOM),
        ({"prompt_logprobs": 1}, Reason.PROMPT_LOGPROBS),
        ({"extra_args": {"kv_policy": "full"}, "prompt_logprobs": 1}, None),
    ],
)
def test_a_refusal_has_one_reason(asked: dict[str, Any], reason: Reason | None) -> None:
    settings = KVSettings.of({"kv_policy": "speed-4"}, num_layers=LAYERS)
    for _ in range(2):  # What was found before is looked up.
        counted: list[Reason] = []
        if reason is None:
            check_request(settings, SamplingParams(**asked), counted.append)
        else:
            with pytest.raises(ValueError):
                check_request(settings, SamplingParams(**asked), counted.append)
        assert counted == ([] if reason is None else [reason])


def test_refusals_are_counted_where_they_happen() -> None:
    refused.begin("refuser")
    before = {r: sample("requests_refused_total", "refuser", reason=str(r)) for r in Reason}
    assert before == dict.fromkeys(Reason, 0)
    refused.count_for("refuser")(Reason.NO_ROOM)
    assert sample("requests_refused_total", "refuser", reason="no_room") == 1


# Several API server processes.

PROCESS = """
    import sys
    from vllm_kvx.policy.counted import CountedPolicies
    from vllm_kvx.server import refusal_reasons as refused
    from vllm_kvx.server.metrics import PolicyMetrics
    from vllm_kvx.server.refusal_reasons import Reason

    refused.begin("m")
    refused.count_for("m")(Reason.NO_ROOM)
    if sys.argv[1] == "exports":
        own = PolicyMetrics("m", "speed-4", CountedPolicies(["speed-4"]))
        for total in (3, 5):
            held = {"requests": total, "blocks_held": 8 - total}
            own.update({"policies": {"speed-4": held}, "layout": {"num_blocks": 140}})
"""
SCRAPE = """
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
"""


def test_processes_add_up_to_one_server(tmp_path: Path) -> None:
    """In Prometheus' multiprocess mode: what one exports once, what each counts as a sum."""

    def run(code: str, *args: str) -> str:
        environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        command = [sys.executable, "-c", textwrap.dedent(code), *args]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    for role in ("exports", "asks it", "asks it"):
        run(PROCESS, role)
    values = {
        (each.name, each.labels.get("reason")): each.value
        for family in text_string_to_metric_families(run(SCRAPE))
        for each in family.samples
    }
    assert not any("pid" in str(name) for name in values)
    assert values["vllm_kvx:requests_refused_total", "no_room"] == 3
    assert values["vllm_kvx:requests_refused_total", "malformed"] == 0
    assert values["vllm_kvx:requests_total", None] == 5
    assert values["vllm_kvx:kv_blocks_held", None] == 3
    assert values["vllm_kvx:kv_pool_blocks", None] == 140


def test_full_has_a_row() -> None:
    settings = KVSettings.of({"kv_policy": "speed-4", "kv_layout": ["fier-64"]}, num_layers=LAYERS)
    names = [name for name, _ in settings.counted_policies().names]
    assert names == ["speed-4", "fier-64", str(KVPolicy())]
