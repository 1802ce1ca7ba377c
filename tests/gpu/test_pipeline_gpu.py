"""Two ranks one after the other, compiled and under CUDA graphs. Skipped without two GPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.pyramidkv import Pyramid
from support.engine import running
from support.expected import FULL, Policy, Read, Speed
from support.gpu import EXACT
from support.parity import ask, assert_parity, in_turn, room_for
from support.prompts import prompts_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

FIER, KEEP = Retrieve(64, dense_below=0), Keep(kv_rate=0.3)
RETAIN: list[Policy] = [
    FULL,
    KEEP,
    Critical(kv_rate=0.3),
    Pyramid(kv_rate=0.3, groups=4),
    Read(FIER),
    Read(FIER, KEEP),
]
# Of 8 layers the second rank has those from 4 on.
PROPAGATE: list[Policy] = [FULL, Speed(4), Speed(4, 3, 2), Read(FIER)]


@pytest.mark.parametrize("policies", [RETAIN, PROPAGATE], ids=["retain", "propagate"])
def test_parity_of_two_ranks(tiny: Callable[..., Path], policies: list[Policy]) -> None:
    """Cold and with prefix hits, and while a request of each policy decodes alone."""
    model = tiny(head_dim=64, hidden=256)
    prompts = prompts_of((97, 33, 200, 5, 161, 64, 130, 250, 48, 500))
    each = in_turn(policies, len(prompts))
    options = EXACT | {"block_size": 32, "max_model_len": 1024, "pipeline_parallel_size": 2}
    with running(
        model, "full", config=room_for(policies), enable_prefix_caching=True, **options
    ) as engine:
        answers = ask(engine, prompts, each, max_tokens=16)
        again = ask(engine, [[*prompt, 7, 8, 9] for prompt in prompts], each, max_tokens=8)
        engine.assert_idle()
    assert any(answer.cached for answer in again)
    assert_parity(model, [*answers, *again], each * 2, most=1)
