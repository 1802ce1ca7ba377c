"""Latencies by policy: what is timed, from when on, and that nothing of an ended request stays."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.request import RequestStatus

from vllm_kvx.cache.latency import FIRST_TOKEN_BOUNDS, PER_TOKEN_BOUNDS, Histogram, Latencies
from vllm_kvx.policy.counted import CountedPolicies
from vllm_kvx.server.metrics import PolicyMetrics
from vllm_kvx.worker.stats import PolicyStats

FULL, SNAPKV = 0, 1
NAMES = [("full", FULL), ("snapkv:kv_floor=0", SNAPKV)]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def request(name: str, arrival: float) -> Any:
    return SimpleNamespace(
        request_id=name,
        arrival_time=arrival,
        num_output_tokens=0,
        status=RequestStatus.RUNNING,
    )


def outputs(*names: str) -> list[Any]:
    return [SimpleNamespace(request_id=name, new_token_ids=[7]) for name in names]


def test_histograms_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0, -0.1):
        histogram.add(seconds)
    assert histogram.cumulative() == [3, 4, 5] and histogram.seconds == 12.0


def test_first_and_later_tokens() -> None:
    clock = Clock()
    latencies = Latencies(clock)
    slow, fast, aborted, short, untold = (
        request(name, at)
        for name, at in zip("sfaxu", (990.0, 999.8, 995.0, 999.0, 1.0), strict=True)
    )
    each_row = (slow, FULL), (fast, SNAPKV), (aborted, FULL), (short, SNAPKV), (untold, SNAPKV)
    for each, row in each_row:
        latencies.begin(each, row)
    assert latencies.add_step(outputs("s", "f")) and not latencies.add_step(outputs("s", "f"))
    # Its first token is its last: vLLM frees it before the step's outputs are looked at.
    short.num_output_tokens, short.status = 1, RequestStatus.FINISHED_STOPPED
    latencies.end(short)
    # Another server drew its first token, and what was kept of its prompt did not come.
    untold.num_output_tokens, untold.status = 1, RequestStatus.FINISHED_ERROR
    latencies.end(untold, is_told=False)
    clock.now += 2.0
    slow.num_output_tokens, slow.status = 21, RequestStatus.FINISHED_LENGTH_CAPPED
    fast.num_output_tokens, fast.status = 9, RequestStatus.FINISHED_ABORTED
    aborted.status = RequestStatus.FINISHED_ABORTED
    for each in (slow, fast, aborted, aborted):
        latencies.end(each)
    told = latencies.as_dict(NAMES)
    first, later = told["first_token"], told["per_token"]
    assert {name: (v[-2], round(v[-1], 6)) for name, v in first.items()} == {
        "full": (1, 10.0),
        "snapkv:kv_floor=0": (2, 1.2),
    }
    assert first["full"][FIRST_TOKEN_BOUNDS.index(5.0)] == 0
    assert first["full"][FIRST_TOKEN_BOUNDS.index(10.0)] == 1
    # Twenty tokens in two seconds; one that was aborted says nothing.
    assert list(later) == ["full"] and round(later["full"][-1], 6) == 0.1
    assert later["full"][PER_TOKEN_BOUNDS.index(0.075)] == 0
    assert len(latencies) == 0 and not latencies.add_step(outputs("s", "f", "a", "x"))


def test_metrics_have_every_bound() -> None:
    """As `histogram_quantile` wants them: bounds that no request kept have their series, too."""
    stats = PolicyStats((4, 4), CountedPolicies(["full", "snapkv:kv_floor=0"]))
    histogram = Histogram(FIRST_TOKEN_BOUNDS)
    histogram.add(3.0)
    told = [*histogram.cumulative(), histogram.seconds]
    stats.scheduler = {"first_token": {"snapkv:kv_floor=0": told}}
    own = PolicyMetrics(
        "latency", "snapkv:kv_floor=0", CountedPolicies(["full", "snapkv:kv_floor=0"])
    )
    for _ in range(2):
        own.update({"policies": stats.as_dict()})

    def sample(name: str, **labels: str) -> float | None:
        labels = {"model_name": "latency", "policy": "snapkv:kv_floor=0", **labels}
        return REGISTRY.get_sample_value(f"vllm_kvx:{name}_total", labels)

    bounds = [*map(str, FIRST_TOKEN_BOUNDS), "+Inf"]
    values = [sample("first_token_bucket", le=bound) for bound in bounds]
    assert values == [0.0] * 5 + [1.0] * 7 and sample("first_token_seconds") == 3.0
    assert sample("per_token_bucket", le="+Inf") is None and sample("per_token_seconds") == 0.0
