"""What the nightly run has besides: longer repetitions of what shorter tests show."""

import pytest

# `--nightly` runs them too.
nightly = pytest.mark.nightly
