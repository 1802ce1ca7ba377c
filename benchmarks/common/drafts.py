"""An engine whose tokens are drafted: what vLLM counts of the drafts, and its end."""

from collections import Counter
from typing import Any

_METRIC = "vllm:spec_decode_num_"


class DraftingServer:
    """vLLM's ``LLM`` as `llm`, with statistics on."""

    llm: Any

    def counted(self) -> Counter[str]:
        """What vLLM has counted of drafts so far; `by depth` as `depth 0`, `depth 1` and so on."""
        found: Counter[str] = Counter()
        for metric in self.llm.get_metrics():
            if metric.name.startswith(_METRIC):
                name = metric.name.removeprefix(_METRIC)
                for depth, value in enumerate(getattr(metric, "values", ())):
                    found[f"depth {depth}"] += value
                found[name] += getattr(metric, "value", 0)
        return found

    def close(self) -> None:
        """Ends the engine, which frees the device's memory."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
