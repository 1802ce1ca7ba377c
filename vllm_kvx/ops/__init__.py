"""Kernels: Triton's, and CUDA operators where they have been built."""

from pathlib import Path

# Where `vllm-kvx build-ops` puts the CUDA operators, if it may.
LIBRARY = Path(__file__).with_name("_kvx_ops.so")
