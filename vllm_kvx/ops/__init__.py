"""Kernels: Triton's, and CUDA operators where they have been built."""

from pathlib import Path

# Where `python -m vllm_kvx.ops.build` puts the CUDA operators.
LIBRARY = Path(__file__).with_name("_kvx_ops.so")
