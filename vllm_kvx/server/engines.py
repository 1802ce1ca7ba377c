"""What several engines of one server counted, as one: data parallelism has an engine a replica.

Each replica of a dense model is an engine with a scheduler, a KV cache and counters of its own,
and knows nothing of the others. A server's figures are their sums. The ranks of an engine's
pipeline run the same requests in different layers: what is counted by layer adds up over them.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

METHOD = "kv_policy_stats"
# How many engines the figures are of.
ENGINES = "engines"

_GROUPS = "groups"
# What is alike in all engines of a server, since it follows from its settings and machine.
_ALIKE = frozenset(
    {
        *(_GROUPS, "ops", "score_ops", "attend_ops", "ops_reason", "policy"),
        *("auto", "dense_below", "dense_below_batch", "dense_below_one"),
    }
)
# What each rank of a pipeline counts of its own layers.
_BY_LAYER = frozenset(
    {
        *("layer_tokens_computed", "layer_tokens_skipped", "entries_retained", "entries_dropped"),
        *("entries_held_in_decode", "entries_scored", "entries_read", "kv_bytes_moved"),
        *("seconds_in_retention", "seconds_in_detector", "seconds_in_sidecar_writes"),
        "recall_samples",
    }
)
# Lists with an item a layer.
_LAYER_LISTS = frozenset({"entries_retained_by_layer", "layers"})

# A mean, and of how many samples.
_MEAN, _SAMPLES = "recall", "recall_samples"


async def read_stats(engine_client: "EngineClient") -> dict[str, Any]:
    """The counters of each engine, added up: see ``kv_policy_stats`` of the worker."""
    parallel = engine_client.vllm_config.parallel_config
    # Tensor-parallel ranks count alike; those of one pipeline stage follow one another.
    stages = slice(None, None, parallel.world_size // parallel.pipeline_parallel_size)
    if parallel.data_parallel_size == 1:
        return {**of_pipeline((await engine_client.collective_rpc(METHOD))[stages]), ENGINES: 1}
    # Where there are several engines, vLLM's own call has all of them answer, and drops the
    # answers of all but the first.
    core: Any = engine_client.engine_core  # type: ignore[attr-defined]
    by_engine = await core.call_utility_all_async("collective_rpc", METHOD, None, (), None)
    return total([of_pipeline(ranks[stages]) for ranks in by_engine])


def of_pipeline(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The statistics of an engine whose pipeline's ranks have these, the first layers' first."""
    found = {name: _of_ranks(name, [rank[name] for rank in ranks]) for name in ranks[0]}
    if _MEAN in found and _SAMPLES in found:
        found[_MEAN] = _mean([(rank[_MEAN], rank[_SAMPLES]) for rank in ranks])
    return found


def _of_ranks(name: str, values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return of_pipeline(values)
    if name in _BY_LAYER:
        return sum(values)
    if name in _LAYER_LISTS:
        return list(chain.from_iterable(values))
    if name == _GROUPS:
        return [of_pipeline(group) for group in zip(*values, strict=True)]
    return values[0]


def total(engines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The statistics of a server whose engines have these."""
    return {**_added(engines), ENGINES: len(engines)}


def _added(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Objects by key; a key may be missing in some, such as a policy that one engine never ran."""
    names = dict.fromkeys(name for part in parts for name in part)
    found = {name: _merged(name, [part[name] for part in parts if name in part]) for name in names}
    if _MEAN in found and _SAMPLES in found:
        found[_MEAN] = _mean([(part.get(_MEAN), part.get(_SAMPLES, 0)) for part in parts])
    return found


def _merged(name: str, values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return _added(values)
    if name in _ALIKE or name == _MEAN:
        return values[0]
    if isinstance(values[0], list):
        return [sum(each) for each in zip(*values, strict=True)]
    return sum(values)


def _mean(measured: Sequence[tuple[float | None, int]]) -> float | None:
    """The mean over all samples; None if there are none."""
    weighted = [(mean, samples) for mean, samples in measured if mean is not None and samples]
    count = sum(samples for _, samples in weighted)
    return sum(mean * samples for mean, samples in weighted) / count if count else None
