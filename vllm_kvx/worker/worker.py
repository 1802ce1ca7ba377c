"""Workers that load the segmented model; everything else is vLLM's."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_kvx.models.registry import use_segmented_model


class _PolicyWorking:
    """Mixin over vLLM's workers."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        use_segmented_model(self.vllm_config.model_config)  # type: ignore[attr-defined]
        super().load_model(*args, **kwargs)  # type: ignore[misc]

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        unshared = getattr(scheduler_output, "kv_policy_unshared", None)
        if unshared:
            self.model_runner.model_state.stats.add_unshared(unshared)  # type: ignore[attr-defined]
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def kv_policy_stats(self) -> dict[str, Any]:
        """Layout and cumulative counters of this rank, for metrics and the status route."""
        return self.model_runner.model_state.kv_policy_stats()  # type: ignore[attr-defined]


class PolicyWorker(_PolicyWorking, Worker):
    """GPU worker under a KV policy."""
