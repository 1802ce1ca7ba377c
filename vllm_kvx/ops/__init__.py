"""Kernels: Triton's, and CUDA operators where they have been built.

A `*_reference` function beside a kernel computes the same in plain torch: tests compare the kernel
with it, and no server calls it.
"""

from pathlib import Path

# Where `vllm-kvx build-ops` puts the CUDA operators, if it may.
LIBRARY = Path(__file__).with_name("_kvx_ops.so")
