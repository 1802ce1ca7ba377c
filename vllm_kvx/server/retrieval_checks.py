"""What servers that retrieve check of operators and of KV blocks, and the blocks that they get."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# What vLLM takes on CPU. From 0.33 on its configuration holds another size until a model is loaded.
_CPU_BLOCK_SIZE = 128


def ops_problems() -> list[str]:
    """What the worker would refuse of variables, as far as can be known without CUDA."""
    import torch
    from vllm.platforms import current_platform

    from vllm_kvx.ops.retrieval import cuda as cuda_ops
    from vllm_kvx.ops.retrieval.backends import BACKEND_VARIABLE, choose_backend
    from vllm_kvx.ops.retrieval.one_launch import VARIABLE

    one_launch = os.environ.get(VARIABLE) or "1"
    if one_launch not in ("0", "1"):
        return [f"{VARIABLE} must be 0, for three launches a layer, or 1, got {one_launch!r}"]
    wanted = os.environ.get(BACKEND_VARIABLE)
    # Whether it suits the GPU only the worker can tell: this process must not touch CUDA.
    if wanted == "cuda" and not current_platform.is_cpu():
        missing = cuda_ops.not_built()
        return [f"{BACKEND_VARIABLE}=cuda: {missing}, or unset it"] if missing else []
    device = torch.device(current_platform.device_type if wanted == "torch" else "cpu")
    try:
        choose_backend(device)
    except ValueError as error:
        return [str(error)]
    return []


def stock_block_size(vllm_config: "VllmConfig") -> int:
    """The size of KV blocks that vLLM is going to take, as far as it says so yet."""
    from vllm.platforms import current_platform

    cache_config = vllm_config.cache_config
    if current_platform.is_cpu() and not cache_config.user_specified_block_size:
        return _CPU_BLOCK_SIZE
    return cache_config.block_size


def block_size_problems(vllm_config: "VllmConfig", group: int, stock: int) -> list[str]:
    """Makes KV blocks whole groups, unless the user has chosen their size.

    stock: see `stock_block_size`; kept, where it will do.
    """
    cache_config = vllm_config.cache_config
    wanted = max(group, 32)
    if cache_config.user_specified_block_size:
        if cache_config.block_size % wanted == 0:
            return []
        return [
            f"KV blocks of {cache_config.block_size} tokens are not whole groups of retrieval: set "
            f"--block-size to a multiple of {wanted}"
        ]
    cache_config.block_size = wanted if stock % wanted else stock
    cache_config.user_specified_block_size = True  # Or the backend's preference would replace it.
    return []
