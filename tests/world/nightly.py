"""What the nightly run has besides: longer repetitions of what shorter tests show."""

import os

import pytest

# KVX_NIGHTLY=1 runs them too.
nightly = pytest.mark.skipif(
    os.environ.get("KVX_NIGHTLY", "0") in ("", "0"), reason="nightly: set KVX_NIGHTLY=1"
)
