"""Retention that waits for generated tokens, which read what retrieval chooses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from reference.after import After
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.pyramidkv import Pyramid
from reference.structkv import Struct
from support import inside
from support.expected import FULL, Policy, Read
from support.parity import assert_parity_and_again
from support.prompts import EDGES

_TSP = Keep(tsp_layer=3, tsp_rate=0.6)


def policies_of(read: Retrieve) -> list[Policy]:
    """Some wait longer than an answer takes, one for a single token, one crosses blocks."""
    return [
        Read(read, After(Keep(kv_rate=0.4), 4)),
        Read(read, After(Critical(kv_rate=0.4), 6)),
        Read(read, After(Keep(kv_budget=90), 40)),
        After(Keep(kv_rate=0.2), 4),
        Read(read, After(Pyramid(kv_rate=0.6, groups=8), 5)),
        Read(replace(read, dense_below=150), After(Keep(kv_rate=0.5, window=3, kernel=1), 1)),
        Read(read, After(replace(_TSP, kv_rate=0.4), 4)),
        Read(read, After(Struct(3, struct_rate=0.6, kv_rate=0.4), 5)),
        Read(read, After(Critical(kv_rate=0.4), 7, propagates=replace(_TSP, kv_rate=1))),
        Read(read, Keep(kv_rate=0.4)),
        Read(read),
        FULL,
    ]


@pytest.mark.parametrize("read", [Retrieve(64), Retrieve(64, pages=True)], ids=["fier", "quest"])
@pytest.mark.usefixtures("dense_ops")
def test_parity(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, read: Retrieve) -> None:
    """In chunks and in a batch, at the edges of blocks and chunks; then over cached prefixes.

    Queries of generated tokens are kept as CUDA graphs do it, and as steps without them do.
    """
    counts = inside.replay_waiting_steps(monkeypatch)
    # Long enough to be read in part before entries go, and after.
    lengths = [*EDGES, *(170 + 23 * i % 110 for i in range(24)), 5, 9]
    assert_parity_and_again(tiny(), lengths, policies_of(read), max_tokens=(44, 9))
    assert counts[True] > counts[False] > 0
