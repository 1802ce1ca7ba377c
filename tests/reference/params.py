"""The models that references are tested on."""

import pytest
from support.nightly import nightly

from .models import ARCHS

# Architecture and KV heads. Mistral's layers are Llama's: nights are enough for it.
MODELS = [
    pytest.param((arch, 2), marks=[nightly] if arch == "mistral" else []) for arch in ARCHS
] + [pytest.param(("llama", 4))]
