"""How engines run on GPUs: compiled, under CUDA graphs, with exact attention in float32."""

from typing import Any

# Tests size their pools themselves; what vLLM wants free at start is kept low, so that several run
# beside each other on a GPU.
COMPILED: dict[str, Any] = dict(enforce_eager=False, block_size=16, gpu_memory_utilization=0.1)
# float32 has no FlashAttention kernel; Triton's is exact.
EXACT: dict[str, Any] = dict(COMPILED, attention_config={"backend": "TRITON_ATTN"})
# Float32 scores of two implementations agree to about this; a closer choice may fall either way.
NEAR_TIE = 5e-5


def why_no_communicator() -> str:
    """Why vLLM's own NCCL communicator is off here, empty if it is not.

    It is off where NCCL lacks a function that vLLM wants, as torch 2.11's does. Data-parallel ranks
    with experts do not start then: their all-gather asserts that the communicator is on.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    try:
        NCCLLibrary()
    except AttributeError as lacks:
        return f"vLLM's NCCL communicator is off ({lacks}): VLLM_NCCL_SO_PATH may name a newer NCCL"
    return ""


def delta_rule_of(name: str) -> dict[str, Any]:
    """Options of hybrids with a delta rule, for which vLLM would want FlashInfer on Hopper."""
    return {"gdn_prefill_backend": "triton"} if name in ("qwen3_next", "qwen3_5_text") else {}
