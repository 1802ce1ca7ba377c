"""The model as its own drafter, compiled, verified under CUDA graphs. Skipped without a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.fier import Retrieve
from support.configs import own_drafts
from support.drafts import watch_own_drafts
from support.engine import running
from support.expected import FULL, Policy, Read, named
from support.gpu import EXACT
from support.inside import count_graph_replays
from support.parity import ask, assert_parity, in_turn, room_for
from support.prompts import prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

COUNT = 4
POLICIES: list[Policy] = [FULL, Read(Retrieve(64, dense_below=0)), FULL]
LENGTHS = (97, 161, 65, 150, 193, 90, 31, 128, 300, 500, 33, 250, 64, 200)
OPTIONS = EXACT | {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
}


def test_answers_are_those_without_drafts(tiny: Callable[..., Path]) -> None:
    """In a batch, and over cached prefixes; alone, `full` verifies under FULL graphs."""
    model = tiny(head_dim=64, hidden=256)
    prompts, each = prompts_of(LENGTHS, seed=7), in_turn(POLICIES, len(LENGTHS))
    with running(
        model,
        "full",
        config=room_for(POLICIES),
        speculative_config=own_drafts(COUNT, "fier-64"),
        **OPTIONS,
    ) as engine:
        found = watch_own_drafts(engine)
        answers = ask(engine, prompts, each, max_tokens=40)
        again = ask(engine, [[*prompt, 7, 8, 9] for prompt in prompts], each, max_tokens=8)
        counts = count_graph_replays(engine)
        alone = ask(engine, prompts[:1], each[:1], max_tokens=40)
        print("steps and replays of full:", counts)
        counted = engine.stats()["policies"]
        print({name: (c["tokens_accepted"], c["tokens_drafted"]) for name, c in counted.items()})
        assert all(counted[named(FULL)][key] for key in ("tokens_drafted", "tokens_accepted"))
        engine.assert_idle()
    assert found and any(answer.cached for answer in again)
    assert_parity(model, [*answers, *again, *alone], [*each, *each, each[0]], most=2)
