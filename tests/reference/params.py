"""The models that references are tested on."""

import pytest
from support.nightly import nightly

from .models import ARCHS

# Architecture and KV heads. Mistral's layers are Llama's, and Qwen2's are Qwen3's but for biases
# and norms of keys: nights are enough for them, and for heads that share no keys.
MODELS = [
    pytest.param((arch, 2), marks=[nightly] if arch in ("mistral", "qwen2") else [])
    for arch in ARCHS
] + [pytest.param(("llama", 4), marks=[nightly])]
