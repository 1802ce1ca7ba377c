"""The CPU worker under a KV policy; apart, because its import needs vLLM's CPU extension."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvx.worker.worker import _PolicyWorking


class CPUPolicyWorker(_PolicyWorking, CPUWorker):
    """CPU worker under a KV policy."""
