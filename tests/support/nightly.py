"""What the nightly run has besides: longer repetitions of what shorter tests show."""

import pytest

from vllm_kvx.config.environment import is_on

# KVX_NIGHTLY=1 runs them too.
nightly = pytest.mark.skipif(not is_on("KVX_NIGHTLY"), reason="nightly: set KVX_NIGHTLY=1")
