"""How engines run on GPUs: compiled, under CUDA graphs, with exact attention in float32."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Tests size their pools themselves; what vLLM wants free at start is kept low, so that several run
# beside each other on a GPU.
COMPILED: dict[str, Any] = dict(enforce_eager=False, block_size=16, gpu_memory_utilization=0.1)
# float32 has no FlashAttention kernel; Triton's is exact.
EXACT: dict[str, Any] = dict(COMPILED, attention_config={"backend": "TRITON_ATTN"})
# Float32 scores of two implementations agree to about this; a closer choice may fall either way.
NEAR_TIE = 5e-5


def delta_rule_of(name: str) -> dict[str, Any]:
    """Options of hybrids with a delta rule, for which vLLM would want FlashInfer on Hopper."""
    return {"gdn_prefill_backend": "triton"} if name in ("qwen3_next", "qwen3_5_text") else {}


def with_nccl(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment`, in which vLLM's own communicator finds the NCCL that torch brings.

    vLLM loads it by its bare name, and the loader looks into no folder of Python packages. Without
    it ranks that share experts end with an assertion. What is set already stays.
    """
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    folders = (spec.submodule_search_locations if spec else None) or ()
    libraries = (Path(folder) / "lib" / "libnccl.so.2" for folder in folders)
    found = next((str(path) for path in libraries if path.is_file()), None)
    return {**({"VLLM_NCCL_SO_PATH": found} if found else {}), **environment}
