"""Steps that verify drafts and retrieve do what their CUDA graphs have in them, against the
references: a row for each token, at fixed addresses, and the groups that the step itself fills."""

from collections.abc import Callable
from pathlib import Path

import pytest
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.swiftkv import Swift
from support import inside
from support.configs import speculative
from support.drafts import Drafter, some
from support.engine import running
from support.expected import FULL, Policy, Read
from support.nightly import nightly
from support.parity import ask, assert_close, assert_parity, in_turn, room_for
from support.prompts import prompts_of

LENGTHS = (97, 161, 65, 150, 193, 90, 31, 128)
TOKENS = 40
RETRIEVE: list[Policy] = [
    Read(Retrieve(64)),
    FULL,
    # Rows of one step lie on both sides of this length.
    Read(Retrieve(48, dense_below=140)),
    Read(Retrieve(64), Keep(kv_rate=0.6)),
]


@pytest.mark.parametrize(
    ("policies", "drafts"),
    [
        (RETRIEVE, 3),
        pytest.param([Read(Retrieve(64))], 5, marks=nightly),
        pytest.param([Read(Retrieve(64, pages=True)), FULL], 4, marks=nightly),
        pytest.param([Read(Retrieve(64), Swift(4)), Read(Retrieve(64))], 2, marks=nightly),
    ],
)
def test_rows_of_a_graph(
    tiny: Callable[..., Path],
    dense_ops: None,
    monkeypatch: pytest.MonkeyPatch,
    policies: list[Policy],
    drafts: int,
) -> None:
    counts = inside.replay_verifying_steps(monkeypatch)
    model = tiny()
    prompts, each = prompts_of(LENGTHS, seed=11), in_turn(policies, len(LENGTHS))
    with running(
        model,
        "full",
        config=room_for(policies),
        enable_prefix_caching=True,
        max_model_len=512,
        max_num_seqs=5,
        speculative_config=speculative(drafts),
    ) as engine:
        inside.poison_free_blocks(engine)
        drafter = Drafter.of(engine, some(3, drafts))
        one_by_one = ask(engine, prompts, each, max_tokens=TOKENS)
        drafter.know(one_by_one)
        assert_close(ask(engine, prompts, each, max_tokens=TOKENS), one_by_one)
        engine.assert_idle()
    assert set(drafter.accepted) == set(range(drafts + 1)), drafter.accepted
    assert counts[True] > 20 and counts[False] > 10, counts
    assert_parity(model, one_by_one, each, most=1)
