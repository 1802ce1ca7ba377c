"""Decode steps that replay FULL CUDA graphs, with drafts to verify and without, against the
references: what is in a graph reads and writes at fixed addresses, padding included."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.after import After
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.swiftkv import Swift
from support import inside
from support.configs import speculative
from support.cpu_graphs import graphs_on_cpu
from support.drafts import Drafter, some
from support.engine import running
from support.expected import FULL, Policy, Read, Speed
from support.nightly import nightly
from support.parity import ask, assert_close, assert_parity, in_turn, room_for
from support.prompts import prompts_of

LENGTHS = (97, 161, 65, 150, 193, 90, 31, 128)
REQUESTS, TOKENS = 5, 40
FIER = Read(Retrieve(64))
MIXED: list[Policy] = [
    FIER,
    FULL,
    # Rows of one step lie on both sides of this length.
    Read(Retrieve(48, dense_below=140)),
    Read(Retrieve(64), Keep(kv_rate=0.6)),
]
QUEST, AFTER = Read(Retrieve(64, pages=True)), After(Keep(kv_rate=0.3), 4)


@pytest.mark.parametrize(
    ("policies", "drafts"),
    [
        (MIXED, 0),
        (MIXED, 3),
        pytest.param([QUEST, FULL], 5, marks=nightly),
        pytest.param([Read(Retrieve(64), Swift(4)), FIER], 2, marks=nightly),
        pytest.param([Speed(4), Keep(kv_rate=0.3), FULL], 4, marks=nightly),
        pytest.param([AFTER, FIER, FULL], 3, marks=nightly),
        pytest.param([AFTER, FIER, FULL], 0, marks=nightly),
        pytest.param([Read(Retrieve(64), AFTER), FIER, FULL], 0, marks=nightly),
        pytest.param([Read(Retrieve(64), AFTER), AFTER, FULL], 3, marks=nightly),
        pytest.param([FIER], 7, marks=nightly),
        pytest.param([Read(Retrieve(64, reuse_layers=2)), FULL], 3, marks=nightly),
        pytest.param([Read(Retrieve(64, dense_layers=0)), FULL], 3, marks=nightly),
    ],
)
def test_steps_replay_graphs(
    tiny: Callable[..., Path],
    dense_ops: None,
    monkeypatch: pytest.MonkeyPatch,
    policies: list[Policy],
    drafts: int,
) -> None:
    rows = 1 + drafts
    inside.room_in_graphs(monkeypatch, REQUESTS * rows)
    model = tiny()
    prompts, each = prompts_of(LENGTHS, seed=11), in_turn(policies, len(LENGTHS))
    options: dict[str, Any] = {"speculative_config": speculative(drafts)} if drafts else {}
    # Steps of three requests are padded.
    sizes = [rows * requests for requests in (1, 2, 4, REQUESTS)]
    with running(
        model,
        "full",
        config=room_for(policies),
        enable_prefix_caching=True,
        max_model_len=512,
        max_num_seqs=REQUESTS,
        **options,
    ) as engine:
        inside.poison_free_blocks(engine)
        drafter = Drafter.of(engine, some(3, drafts)) if drafts else None
        with graphs_on_cpu(engine, sizes) as counts:
            one_by_one = ask(engine, prompts, each, max_tokens=TOKENS)
            if drafter is not None:
                drafter.know(one_by_one)
                assert_close(ask(engine, prompts, each, max_tokens=TOKENS), one_by_one)
        engine.assert_idle()
    assert drafter is None or drafter.accepted.keys() == set(range(drafts + 1)), drafter.accepted
    assert counts[sizes[2]] > 3 and counts.total() > 20, counts
    assert_parity(model, one_by_one, each, most=1)
