"""Retention that waits for generated tokens, against the dense float32 reference."""

from collections.abc import Callable
from pathlib import Path

import pytest
from reference.after import After
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.pyramidkv import Pyramid
from support import inside
from support.expected import FULL, Policy
from support.nightly import nightly
from support.parity import assert_parity_and_again, assert_parity_preempted
from support.prompts import EDGES

from vllm_kvx.cache import admission

# Some wait longer than an answer takes, one for a single token, one crosses blocks meanwhile.
POLICIES: list[Policy] = [
    After(Keep(kv_rate=0.2), 4),
    After(Critical(kv_rate=0.2), 6),
    After(Keep(kv_rate=0.1, window=3, kernel=1), 1),
    Keep(kv_rate=0.2),
    After(Keep(kv_budget=40), 40),
    # Its lowest layer keeps the whole prompt.
    After(Pyramid(kv_rate=0.6, groups=8), 5),
    FULL,
]


@pytest.mark.usefixtures("dense_ops")
def test_parity(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks and in a batch, at the edges of blocks and chunks; then over cached prefixes.

    Queries of generated tokens are kept as CUDA graphs do it, and as steps without them do.
    """
    counts = inside.replay_waiting_steps(monkeypatch)
    assert_parity_and_again(tiny(), [*EDGES, 5, 9, 150, 180], POLICIES, max_tokens=(44, 9))
    assert counts[True] > counts[False] > 0


@pytest.mark.usefixtures("dense_ops")
@nightly
def test_preempted(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the generated tokens are in, and after them; two requests wait for theirs at once."""
    monkeypatch.setattr(admission, "GENERATED_WINDOWS", 2)
    options = {"num_gpu_blocks_override": 24, "max_model_len": 512}
    assert_parity_preempted(tiny(), POLICIES[:4], **options)
