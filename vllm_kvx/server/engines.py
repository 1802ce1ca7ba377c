"""What several engines of one server counted, as one: data parallelism has an engine a replica.

Each replica of a dense model is an engine with a scheduler, a KV cache and counters of its own,
and knows nothing of the others. A server's figures are their sums.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

METHOD = "kv_policy_stats"
# How many engines the figures are of.
ENGINES = "engines"

# What is alike in all engines of a server, since it follows from its settings and machine.
_ALIKE = frozenset(
    {
        *("groups", "ops", "score_ops", "attend_ops", "ops_reason", "policy"),
        *("auto", "dense_below", "dense_below_batch"),
    }
)
# A mean, and of how many samples.
_MEAN, _SAMPLES = "recall", "recall_samples"


async def read_stats(engine_client: "EngineClient") -> dict[str, Any]:
    """The counters of rank 0 of each engine, added up: see ``kv_policy_stats`` of the worker."""
    if engine_client.vllm_config.parallel_config.data_parallel_size == 1:
        return {**(await engine_client.collective_rpc(METHOD))[0], ENGINES: 1}
    # Where there are several engines, vLLM's own call has all of them answer, and drops the
    # answers of all but the first.
    core: Any = engine_client.engine_core  # type: ignore[attr-defined]
    by_engine = await core.call_utility_all_async("collective_rpc", METHOD, None, (), None)
    return total([ranks[0] for ranks in by_engine])


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
