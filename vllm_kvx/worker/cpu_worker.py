"""The CPU worker under a KV policy; apart, because its import needs vLLM's CPU extension."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvx.compat.cpu_lora import leave_rows_without_adapter
from vllm_kvx.worker.worker import _PolicyWorking


class CPUPolicyWorker(_PolicyWorking, CPUWorker):
    """CPU worker under a KV policy."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if self.vllm_config.lora_config is not None:
            leave_rows_without_adapter()
        super().load_model(*args, **kwargs)
