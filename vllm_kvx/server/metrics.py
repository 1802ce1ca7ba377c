"""Prometheus metrics, per policy, in the registry behind the server's ``/metrics``.

The workers keep running totals; Prometheus counters are moved up by what was added since. With
several API server processes only one exports, or their sum would count everything several times.
"""

import functools
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge

from vllm_kvx.settings import MAX_POLICIES, OTHER

PREFIX = "vllm_kvx:"
LABELS = ("model_name", "policy")

# Field of the workers' statistics -> (metric, help).
COUNTERS = {
    "requests": ("requests", "Requests started under the policy."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens prefilled, at whatever depth."),
    "layer_tokens_computed": (
        "layer_tokens_computed",
        "Tokens times the layers that computed them, prompt and generated.",
    ),
    "layer_tokens_skipped": (
        "layer_tokens_skipped",
        "Prompt tokens times the layers that the policy spared them.",
    ),
    "prefix_not_shared": (
        "prefix_cache_requests_not_shared",
        "Requests that could not use the prefix cache because of their policy.",
    ),
    "tokens_propagated": (
        "tokens_propagated",
        "Prompt tokens chosen by saliency to go on to the upper layers.",
    ),
    "entries_retained": (
        "kv_entries_retained",
        "Prompt entries kept, summed over layers; entries count once for all KV heads.",
    ),
    "entries_dropped": (
        "kv_entries_dropped",
        "Prompt entries computed and dropped by retention, summed over layers.",
    ),
    "blocks_freed": ("kv_blocks_freed", "KV cache blocks given back when prompts were in."),
    "entries_held_in_decode": (
        "kv_entries_held_in_decode",
        "Entries that decode tokens under retrieval could have read, summed over layers.",
    ),
    "entries_scored": (
        "kv_entries_scored",
        "Entries that retrieval scored for decode tokens, summed over layers.",
    ),
    "entries_read": (
        "kv_entries_read",
        "Entries that decode tokens under retrieval read per KV head, summed over layers.",
    ),
    "retrieval_steps": ("retrieval_steps", "Decode tokens that read a selection of entries."),
    "dense_fallbacks": (
        "retrieval_dense_fallbacks",
        "Decode tokens under retrieval whose context was short enough to be read whole.",
    ),
}
LAYER_COUNTER = (
    "layer_kv_entries_retained",
    "Prompt entries that one layer kept of prompts that retention or selection ran on.",
)
SECONDS = (
    "retention_seconds",
    "Device seconds in saliency, selection and compaction, of one rank.",
)
BYTES_MOVED = (
    "kv_bytes_moved",
    "Bytes of keys and values that retention copied to other slots, of one rank.",
)
GAUGES = {
    "blocks_held": ("kv_blocks_held", "KV cache blocks held by running requests."),
    "blocks_saved": (
        "kv_blocks_saved",
        "KV cache blocks that running requests would hold besides under full.",
    ),
}
POOL_GAUGES = {
    "pool_prompt_tokens": (
        "kv_pool_tokens",
        "Prompt tokens that the KV cache holds under the server's policy.",
    ),
    "stock_pool_tokens": (
        "stock_kv_pool_tokens",
        "Prompt tokens that the same memory would hold in stock vLLM.",
    ),
}
RECALL_GAUGES = {
    "recall": (
        "retrieval_recall",
        "Share of exact attention that falls on what retrieval selects, where measured, of one "
        "rank.",
    ),
    "recall_samples": (
        "retrieval_recall_samples",
        "Rows and query heads that the recall is the mean of.",
    ),
}

STASH_GAUGES = {
    "stash_tokens": (
        "stash_tokens",
        "Prompt tokens whose hidden states can wait for their prompt's last chunk.",
    ),
    "stash_tokens_used": ("stash_tokens_used", "How many of these are taken, in whole pages."),
}


class _Metrics(NamedTuple):
    counters: dict[str, Counter]
    gauges: dict[str, Gauge]
    pool: dict[str, Gauge]
    stash: dict[str, Gauge]
    recall: dict[str, Gauge]
    layers: Counter
    seconds: Counter
    moved: Counter


@functools.cache
def _metrics() -> _Metrics:
    """The metrics of this process; Prometheus refuses to have them twice."""

    def gauge(name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, LABELS, multiprocess_mode="mostrecent")

    return _Metrics(
        {field: Counter(PREFIX + name, text, LABELS) for field, (name, text) in COUNTERS.items()},
        {field: gauge(name, text) for field, (name, text) in GAUGES.items()},
        {field: gauge(name, text) for field, (name, text) in POOL_GAUGES.items()},
        {field: gauge(name, text) for field, (name, text) in STASH_GAUGES.items()},
        {field: gauge(name, text) for field, (name, text) in RECALL_GAUGES.items()},
        Counter(PREFIX + LAYER_COUNTER[0], LAYER_COUNTER[1], (*LABELS, "layer")),
        Counter(PREFIX + SECONDS[0], SECONDS[1], LABELS),
        Counter(PREFIX + BYTES_MOVED[0], BYTES_MOVED[1], LABELS),
    )


class PolicyMetrics:
    """The metrics of one server.

    model_name: the served model name, vLLM's own label.
    policy: the server's policy; its series are there from the start.
    """

    def __init__(self, model_name: str, policy: str) -> None:
        self.model_name = model_name
        self.policy = policy
        self._seen: dict[tuple[str, str], float] = {}
        self._labels: set[str] = set()
        label = self._label(policy)
        for metric in (*_metrics().counters.values(), *_metrics().gauges.values()):
            metric.labels(model_name, label)

    def update(self, stats: dict[str, Any]) -> None:
        """Takes over the totals in `stats`, as ``kv_policy_stats`` of the worker gives them."""
        policies = stats.get("policies", {})
        gauges: dict[tuple[str, str], int] = {}
        for name, values in policies.items():
            label = self._label(name)
            for field, counter in _metrics().counters.items():
                added = self._added(name, field, values.get(field, 0))
                if added:
                    counter.labels(self.model_name, label).inc(added)
            for layer, total in enumerate(values.get("entries_retained_by_layer", ())):
                added = self._added(name, f"layer {layer}", total)
                if added:
                    _metrics().layers.labels(self.model_name, label, str(layer)).inc(added)
            for field in GAUGES:
                key = (field, label)
                gauges[key] = gauges.get(key, 0) + values.get(field, 0)
        for (field, label), value in gauges.items():
            _metrics().gauges[field].labels(self.model_name, label).set(value)
        for field, gauge in _metrics().pool.items():
            if (tokens := stats.get("layout", {}).get(field)) is not None:
                gauge.labels(self.model_name, self.policy).set(tokens)

        for field, gauge in _metrics().stash.items():
            gauge.labels(self.model_name, self.policy).set(stats.get(field, 0))
        for field, gauge in _metrics().recall.items():
            if (value := stats.get("retrieval", {}).get(field)) is not None:
                gauge.labels(self.model_name, self.policy).set(value)
        added = self._added("", "seconds", stats.get("seconds_in_retention", 0.0))
        _metrics().seconds.labels(self.model_name, self.policy).inc(added)
        added = self._added("", "moved", stats.get("kv_bytes_moved", 0))
        _metrics().moved.labels(self.model_name, self.policy).inc(added)

    def _added(self, name: str, field: str, total: float) -> float:
        """How far a total moved; one that fell was restarted, and counts from 0 again."""
        seen = self._seen.get((name, field), 0)
        self._seen[name, field] = total
        return total - seen if total >= seen else total

    def _label(self, name: str) -> str:
        if name in self._labels or len(self._labels) < MAX_POLICIES:
            self._labels.add(name)
            return name
        return OTHER
