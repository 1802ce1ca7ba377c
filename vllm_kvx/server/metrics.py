"""Prometheus metrics in the registry behind the server's ``/metrics``.

The workers keep running totals; Prometheus counters are moved up by what was added since. With
several API server processes only one exports these, or their sum would count everything several
times; what an API process itself counts (``refused``) each exports for its own requests.

A metric has the label ``policy`` where a request's policy caused what it shows, and
``server_policy``, the policy that the server was started for, where it is the server's own.
"""

import functools
import math
import time
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge

from vllm_kvx.policy.counted import OTHER, CountedPolicies

PREFIX = "vllm_kvx:"
BY_POLICY = ("model_name", "policy")
BY_LAYER = (*BY_POLICY, "layer")
# As in a histogram of Prometheus: `histogram_quantile` takes them.
BY_BOUND = (*BY_POLICY, "le")
OF_SERVER = ("model_name", "server_policy")
BY_REASON = ("model_name", "reason")


class Metric(NamedTuple):
    """A metric without the prefix of its name; counters get ``_total`` from Prometheus."""

    name: str
    text: str
    labels: tuple[str, ...] = BY_POLICY


# Field of the workers' statistics of a policy -> metric.
COUNTERS = {
    "requests": Metric("requests", "Requests started under the policy."),
    "prompt_tokens": Metric("prompt_tokens", "Prompt tokens prefilled, at whatever depth."),
    "layer_tokens_computed": Metric(
        "layer_tokens_computed",
        "Tokens times the layers that computed them, prompt and generated.",
    ),
    "layer_tokens_skipped": Metric(
        "layer_tokens_skipped", "Prompt tokens times the layers that the policy spared them."
    ),
    "prefix_not_shared": Metric(
        "prefix_cache_requests_not_shared",
        "Requests that could not use the prefix cache because of their policy.",
    ),
    "prefix_hit": Metric(
        "prefix_cache_hit_tokens", "Tokens that requests took from the prefix cache."
    ),
    "prefix_cached": Metric(
        "prefix_cache_found_tokens",
        "Tokens at the beginning of requests that were in the prefix cache: what stock vLLM would "
        "take of the same cache.",
    ),
    "prefix_states": Metric(
        "prefix_cache_state_tokens",
        "Tokens whose hidden states went into the prefix cache, for layers above a selection.",
    ),
    "tokens_propagated": Metric(
        "tokens_propagated", "Prompt tokens chosen by saliency to go on to the upper layers."
    ),
    "entries_retained": Metric(
        "kv_entries_retained",
        "Prompt entries kept, summed over layers; entries count once for all KV heads.",
    ),
    "entries_dropped": Metric(
        "kv_entries_dropped",
        "Prompt entries computed and dropped by retention, summed over layers.",
    ),
    "blocks_freed": Metric("kv_blocks_freed", "KV cache blocks given back when prompts were in."),
    "kv_bytes_moved": Metric(
        "kv_bytes_moved",
        "Bytes of keys and values that retention copied to other slots, of one rank.",
    ),
    "seconds_in_retention": Metric(
        "retention_seconds",
        "Device seconds in saliency, selection and compaction, of one rank.",
    ),
    "seconds_in_detector": Metric(
        "detector_seconds",
        "Device seconds in StructKV's centrality and detector, of one rank; a part of those in "
        "retention.",
    ),
    "entries_held_in_decode": Metric(
        "kv_entries_held_in_decode",
        "Entries that decode tokens under retrieval could have read, summed over layers.",
    ),
    "entries_scored": Metric(
        "kv_entries_scored",
        "Entries that retrieval scored for decode tokens, summed over the layers that did.",
    ),
    "entries_read": Metric(
        "kv_entries_read",
        "Entries that decode tokens under retrieval read per KV head, summed over layers.",
    ),
    "retrieval_steps": Metric("retrieval_steps", "Decode tokens that read a selection of entries."),
    "dense_fallbacks": Metric(
        "retrieval_dense_fallbacks",
        "Decode tokens under retrieval that read all: a short context, a small batch, or "
        "dense_layers of the whole model.",
    ),
    "tokens_drafted": Metric("draft_tokens", "Tokens drafted for requests and verified."),
    "tokens_accepted": Metric("accepted_draft_tokens", "Of the drafted tokens, those that stay."),
    "first_token_seconds": Metric(
        "first_token_seconds", "Seconds that requests waited for their first token, added up."
    ),
    "per_token_seconds": Metric(
        "per_token_seconds",
        "Mean seconds of each token after a request's first, added up over requests.",
    ),
}
# Fields with a total by layer.
LAYER_COUNTERS = {
    "entries_retained_by_layer": Metric(
        "layer_kv_entries_retained",
        "Prompt entries that one layer kept of prompts that retention or selection ran on.",
        BY_LAYER,
    ),
    "online_pivots": Metric(
        "online_pivots", "Prompts whose pivot was found online to be the layer.", BY_LAYER
    ),
}
# Fields with a total by upper bound in seconds, each of which has the smaller ones in it.
BUCKET_COUNTERS = {
    "first_token_buckets": Metric(
        "first_token_bucket",
        "Requests whose first token came within so many seconds after they did.",
        BY_BOUND,
    ),
    "per_token_buckets": Metric(
        "per_token_bucket",
        "Requests whose later tokens took so many seconds each, on average.",
        BY_BOUND,
    ),
}
GAUGES = {
    "blocks_held": Metric(
        "kv_blocks_held",
        "KV cache blocks held by requests; one that several share counts once, under the policy "
        "that brought it in.",
    ),
    "blocks_saved": Metric(
        "kv_blocks_saved",
        "KV cache blocks that stock vLLM would hold besides for these requests, with the same "
        "prefixes shared. Negative: in the step that compacts a prompt; where many share a prefix, "
        "which stock shares in all layers; where another policy's request brought a prefix in.",
    ),
    "stash_tokens_used": Metric(
        "stash_tokens_used",
        "Prompt tokens that the stash holds or has set aside, in whole pages.",
    ),
}
# Fields that are None until something was measured.
MEASURED = {
    "recall": Metric(
        "retrieval_recall",
        "Share of exact attention that falls on what retrieval selects, where measured, of one "
        "rank.",
    ),
    "recall_samples": Metric(
        "retrieval_recall_samples", "Rows and query heads that the recall is the mean of."
    ),
}
# Part of the statistics ("" for their top) and field -> metric.
SERVER_COUNTERS = {
    ("", "stash_waits"): Metric(
        "stash_waits", "Prompts that had to wait for room in the stash.", OF_SERVER
    ),
    ("", "stash_wait_seconds"): Metric(
        "stash_wait_seconds",
        "Seconds that prompts waited for room in the stash, added up over prompts.",
        OF_SERVER,
    ),
    ("retrieval", "seconds_in_sidecar_writes"): Metric(
        "sidecar_write_seconds",
        "Device seconds in writing 1-bit keys or bounds, of one rank.",
        OF_SERVER,
    ),
}
SERVER_GAUGES = {
    ("layout", "num_blocks"): Metric(
        "kv_pool_blocks", "KV cache blocks of the pool, vLLM's null block included.", OF_SERVER
    ),
    ("layout", "pool_prompt_tokens"): Metric(
        "kv_pool_tokens",
        "Prompt tokens that the KV cache holds under the server's policy.",
        OF_SERVER,
    ),
    ("layout", "stock_pool_tokens"): Metric(
        "stock_kv_pool_tokens",
        "Prompt tokens that the same memory would hold in stock vLLM.",
        OF_SERVER,
    ),
    ("", "stash_tokens"): Metric(
        "stash_tokens",
        "Prompt tokens whose hidden states can wait for their prompt's last chunk.",
        OF_SERVER,
    ),
    ("retrieval", "auto"): Metric(
        "retrieval_crossover_tokens",
        "Context from which on retrieval pays for one request on this machine; +Inf if none.",
        OF_SERVER,
    ),
    ("retrieval", "dense_below"): Metric(
        "retrieval_dense_below_tokens",
        "From here on requests of the server's policy retrieve in every step; +Inf if never.",
        OF_SERVER,
    ),
    ("retrieval", "dense_below_batch"): Metric(
        "retrieval_dense_below_batch_tokens",
        "From here on a batch of --max-num-seqs such requests retrieves; +Inf if never.",
        OF_SERVER,
    ),
    ("retrieval", "dense_below_one"): Metric(
        "retrieval_dense_below_one_tokens",
        "From here on a request retrieves in a step of its own, by one launch a layer; +Inf: none.",
        OF_SERVER,
    ),
}
EVALUATED = Metric(
    "policy_evaluated",
    "Whether `vllm-kvx evaluate --save` had measured the policy's answers on these weights when "
    "the server started.",
)
RUN_IN_FULL = Metric(
    "requests_run_in_full",
    "Requests that run under full in the place of the policy that they or the server name.",
    BY_REASON,
)
REFUSED = Metric(
    "requests_refused", "Requests that vllm-kvx answered with a 400, by reason.", BY_REASON
)
UPDATED = Metric(
    "counters_updated_timestamp_seconds",
    "When these metrics were last read from the engine, in seconds since the epoch; 0 for never.",
    OF_SERVER,
)
BUILD_INFO = Metric(
    "build_info",
    "Versions, and what the server was started for; always 1.",
    (*OF_SERVER, "version", "vllm_version", "torch_version", "layout"),
)
AUTO_INFO = Metric(
    "auto_policy_info",
    "Which policy the server chose where it was started with `auto`, and whether by a measurement; "
    "always 1.",
    (*BY_POLICY, "named", "source"),
)
OPS_INFO = Metric(
    "retrieval_ops_info",
    "Which operators retrieve, and why these; 1 for those that run.",
    (*OF_SERVER, "score", "attend", "reason"),
)

ALL_COUNTERS = (
    *COUNTERS.values(),
    *LAYER_COUNTERS.values(),
    *BUCKET_COUNTERS.values(),
    *SERVER_COUNTERS.values(),
    RUN_IN_FULL,
    REFUSED,
)
ALL_GAUGES = (
    *GAUGES.values(),
    *MEASURED.values(),
    *SERVER_GAUGES.values(),
    EVALUATED,
    UPDATED,
    BUILD_INFO,
    AUTO_INFO,
    OPS_INFO,
)


@functools.cache
def _counters() -> dict[Metric, Counter]:
    """The counters of this process; Prometheus refuses to have them twice."""
    return {m: Counter(PREFIX + m.name, m.text, m.labels) for m in ALL_COUNTERS}


@functools.cache
def _gauges() -> dict[Metric, Gauge]:
    """The same of gauges. One process sets them, and what it set last holds."""
    return {
        m: Gauge(PREFIX + m.name, m.text, m.labels, multiprocess_mode="mostrecent")
        for m in ALL_GAUGES
    }


def counter(metric: Metric, *labels: str) -> Counter:
    """The series of a counter with these labels; there from now on, at 0."""
    return _counters()[metric].labels(*labels)


def gauge(metric: Metric, *labels: str) -> Gauge:
    """The same of a gauge."""
    return _gauges()[metric].labels(*labels)


class PolicyMetrics:
    """The metrics of one server.

    model_name: the served model name, vLLM's own label. server_policy: the server's policy.
    policies: what has series of its own; those that are in it have theirs from the start.
    """

    def __init__(self, model_name: str, server_policy: str, policies: CountedPolicies) -> None:
        self.model_name = model_name
        self.server = (model_name, server_policy)
        self._policies = policies
        self._seen: dict[tuple[str, ...], float] = {}
        self._labels: set[str] = set()
        self._ops: tuple[str, ...] | None = None
        for name, _ in policies.names:
            self._label(name)
        gauge(UPDATED, *self.server)

    def update(self, stats: dict[str, Any]) -> None:
        """Takes over the totals in `stats`, as ``kv_policy_stats`` of the worker gives them."""
        self._update_policies(stats.get("policies", {}))
        for (part, field), metric in SERVER_COUNTERS.items():
            values = stats.get(part, {}) if part else stats
            if field in values:
                added = self._added((field,), values[field])
                counter(metric, *self.server).inc(added)
        for (part, field), metric in SERVER_GAUGES.items():
            values = stats.get(part, {}) if part else stats
            if field in values:
                value = values[field]
                gauge(metric, *self.server).set(math.inf if value is None else value)
        for reason, total in stats.get("run_in_full", {}).items():
            added = self._added(("run in full", reason), total)
            counter(RUN_IN_FULL, self.model_name, reason).inc(added)
        self._tell_ops(stats.get("retrieval", {}))
        gauge(UPDATED, *self.server).set(time.time())

    def _update_policies(self, policies: dict[str, dict[str, Any]]) -> None:
        now = {(metric, label): 0 for metric in GAUGES.values() for label in self._labels}
        for name, values in policies.items():
            label = self._label(name)
            for field, metric in COUNTERS.items():
                if added := self._added((name, field), values.get(field, 0)):
                    counter(metric, self.model_name, label).inc(added)
            for field, metric in LAYER_COUNTERS.items():
                for layer, total in _by_layer(values.get(field, ())):
                    if added := self._added((name, field, layer), total):
                        counter(metric, self.model_name, label, layer).inc(added)
            for field, metric in BUCKET_COUNTERS.items():
                # All bounds from the first request on, also those that none kept.
                for bound, total in values.get(field, {}).items():
                    added = self._added((name, field, bound), total)
                    counter(metric, self.model_name, label, bound).inc(added)
            for field, metric in GAUGES.items():
                now[metric, label] = now.get((metric, label), 0) + values.get(field, 0)
            if values.get("recall") is not None:
                for field, metric in MEASURED.items():
                    gauge(metric, self.model_name, label).set(values[field])
        for (metric, label), value in now.items():
            gauge(metric, self.model_name, label).set(value)

    def _tell_ops(self, retrieval: dict[str, Any]) -> None:
        if "ops_reason" not in retrieval:
            return
        ops = tuple(retrieval[field] for field in ("score_ops", "attend_ops", "ops_reason"))
        if self._ops not in (None, ops):
            gauge(OPS_INFO, *self.server, *self._ops).set(0)
        self._ops = ops
        gauge(OPS_INFO, *self.server, *ops).set(1)

    def _added(self, key: tuple[str, ...], total: float) -> float:
        """How far a total moved; one that fell was restarted, and counts from 0 again."""
        seen = self._seen.get(key, 0)
        self._seen[key] = total
        return total - seen if total >= seen else total

    def _label(self, name: str) -> str:
        """The label that a policy counts under, whose series are there from now on."""
        label = OTHER if self._policies.row_of(name) == self._policies.size - 1 else name
        if label not in self._labels:
            self._labels.add(label)
            for metric in COUNTERS.values():
                counter(metric, self.model_name, label)
            for metric in GAUGES.values():
                gauge(metric, self.model_name, label)
        return label


def _by_layer(totals: Any) -> list[tuple[str, int]]:
    """Totals by layer, in a list or by the layer's number as JSON has it."""
    if isinstance(totals, dict):
        return list(totals.items())
    return [(str(layer), total) for layer, total in enumerate(totals)]
