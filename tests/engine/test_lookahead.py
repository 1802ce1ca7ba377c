"""Retention that looks ahead, against the dense float32 reference."""

from collections.abc import Callable
from pathlib import Path

import pytest
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.lookahead import Lookahead
from reference.pyramidkv import Pyramid
from support.expected import FULL, Policy
from support.parity import assert_parity_and_again, assert_parity_preempted
from support.prompts import EDGES

from vllm_kvx.cache import admission

# One drafts a single token, one crosses blocks, and of one the shortest prompts keep all.
POLICIES: list[Policy] = [
    Lookahead(Keep(kv_rate=0.2), 4),
    Lookahead(Critical(kv_rate=0.2), 6),
    Lookahead(Keep(kv_rate=0.1, window=3, kernel=1), 1),
    Keep(kv_rate=0.2),
    Lookahead(Keep(kv_budget=40), 40),
    # Its lowest layer keeps the whole prompt.
    Lookahead(Pyramid(kv_rate=0.6, groups=8), 5),
    FULL,
]


@pytest.mark.usefixtures("dense_ops")
def test_parity(tiny: Callable[..., Path]) -> None:
    """In chunks and in a batch, at the edges of blocks and chunks; then over cached prefixes."""
    assert_parity_and_again(tiny(), [*EDGES, 5, 9, 150, 180], POLICIES, max_tokens=(24, 9))


@pytest.mark.usefixtures("dense_ops")
def test_preempted(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that comes in again is drafted again; two of them draft in one step at most."""
    monkeypatch.setattr(admission, "GENERATED_WINDOWS", 2)
    options = {"num_gpu_blocks_override": 24, "max_model_len": 512}
    assert_parity_preempted(tiny(), POLICIES[:4], **options)
