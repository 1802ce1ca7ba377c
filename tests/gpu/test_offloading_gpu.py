"""Prompts that vLLM's connector offloads to the CPU's memory and loads. Skipped without a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.fier import Retrieve
from support.engine import running
from support.expected import FULL, Policy, Read
from support.gpu import EXACT
from support.parity import ask, assert_parity, room_for
from support.prompts import prompts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FIER = Read(Retrieve(64, dense_below=0))
QUEST = Read(Retrieve(64, group=32, pages=True, dense_below=0))
LENGTHS = (200, 65, 161, 300, 480, 97)


@pytest.mark.parametrize(
    ("before", "after"), [(FULL, FIER), (FIER, FULL), (FIER, FIER), (FULL, QUEST)]
)
def test_what_one_offloads_another_loads(
    tiny: Callable[..., Path], before: Policy, after: Policy
) -> None:
    """The pool holds a few prompts, so what comes back is no longer in it."""
    model = tiny(head_dim=64, hidden=256)
    prompts, others = prompts_of(LENGTHS), prompts_of((500,) * 6, seed=1)
    options = EXACT | dict(block_size=32, max_model_len=640, max_num_seqs=8)
    with running(
        model,
        "full",
        config=room_for([before, after]),
        enable_prefix_caching=True,
        num_gpu_blocks_override=80,
        kv_offloading_size=1,
        **options,
    ) as engine:
        cold = ask(engine, prompts, [before] * len(prompts), max_tokens=40)
        ask(engine, others, [FULL] * len(others), max_tokens=2)
        loaded = ask(engine, prompts, [after] * len(prompts), max_tokens=40)
        assert sum(answer.cached > 0 for answer in loaded) > len(loaded) // 2
        engine.assert_idle()
    assert_parity(model, [*cold, *loaded], [before] * len(cold) + [after] * len(loaded))
