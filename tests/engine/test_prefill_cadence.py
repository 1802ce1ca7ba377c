"""Prompts that run in some steps only, so that decodes run undisturbed in between."""

from collections.abc import Callable
from pathlib import Path

import pytest
import vllm
from reference.fastkv import Keep
from support import inside
from support.engine import running
from support.expected import FULL
from support.parity import ask, assert_parity
from support.prompts import prompts_of

from vllm_kvx.compat.vllm_signatures import release_line

INTERVAL = 4


@pytest.mark.skipif(
    release_line(vllm.__version__) == "0.32", reason="there it is for data parallel servers alone"
)
@pytest.mark.usefixtures("dense_ops")
def test_a_cadence_of_prefills_changes_no_answer(tiny: Callable[..., Path]) -> None:
    """Prompts wait between two chunks, with pages of the stash and windows that are split."""
    model = tiny()
    keep = Keep(tsp_layer=3, tsp_rate=0.3, kv_rate=0.2)
    prompts = prompts_of((40, 230, 150, 97, 260, 130, 8, 190))
    policies = [FULL, keep, keep, keep, keep, FULL, keep, keep]
    with running(
        model,
        "fastkv:tsp_layer=3,tsp_rate=0.3,kv_rate=0.2,kv_floor=0",
        prefill_schedule_interval=INTERVAL,
        max_num_seqs=3,
        max_num_batched_tokens=64,
    ) as engine:
        assert engine.scheduler.local_prefill_interval == INTERVAL
        chunks = inside.watch_chunks(engine)
        answers = ask(engine, prompts, policies, max_tokens=12)
        engine.assert_idle()
    assert any(len(starts) > 2 for starts in chunks.values()), "some come in over several steps"
    assert_parity(model, answers, policies)
