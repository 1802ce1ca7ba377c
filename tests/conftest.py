"""Shared set-up: on a machine without a GPU every test runs vLLM's Model Runner V2 on CPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("KVX_CPU", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
