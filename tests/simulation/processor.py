"""Imported before vLLM is: the simulation runs on the processor, by vLLM's build for GPUs too.

vLLM takes its platform for CPUs without a look at the machine, and so calls no platform plugin.
GPUs are hidden, so that nothing is begun on one that does other work.
"""

import os

os.environ.update(VLLM_TARGET_DEVICE="cpu", CUDA_VISIBLE_DEVICES="")
os.environ.update(KVX_CPU="1", TRITON_INTERPRET="1")
import conftest  # noqa: F401  The rest of the environment.

from vllm_kvx.compat.cpu_mode import platform_plugin

platform_plugin()
