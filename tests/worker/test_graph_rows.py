"""The rows that CUDA graphs read, step by step: nothing of an earlier step is left in them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_kvx.ops.retrieval.costs import Costs, StepCosts
from vllm_kvx.worker.decode.graph_rows import GraphRows
from vllm_kvx.worker.decode.step import RetrievalStep, Rules

COSTS = StepCosts(Costs(whole=0, whole_entry=4, fixed=0, scored=1, read=2))
CPU = torch.device("cpu")


def rows_of(stages: int, drafts: int) -> GraphRows:
    layout: Any = SimpleNamespace(unit=4, group=32)
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=6, async_scheduling=False),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=32),
        num_speculative_tokens=drafts,
    )
    return GraphRows(layout, stages, config, CPU)


def step_of(stages: int, num_reqs: int, count: int, seed: int) -> RetrievalStep:
    random = np.random.default_rng(seed)
    prompts = random.integers(100, 900, num_reqs)
    counts, begins = np.full(num_reqs, count), prompts + random.integers(3, 9, num_reqs)
    stored = (begins + counts) - random.integers(0, 90, (stages, num_reqs))
    budgets = random.choice([0, 16, 32], num_reqs)
    rules = Rules(budgets, np.full(num_reqs, 64), random.integers(64, 800, num_reqs), unit=4)
    none = np.zeros(num_reqs, dtype=np.int64)
    return RetrievalStep.of(rules, COSTS, none, begins, counts, prompts, stored, None)


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("stages", [1, 3])
def test_what_a_step_leaves_is_gone(stages: int, drafts: int) -> None:
    """Steps shrink and grow, and graphs are captured between, whose rows do nothing."""
    used, sizes, filled = rows_of(stages, drafts), [6, 2, 5, 0, 1, 6, 0, 0, 3, 1], False
    for seed, size in enumerate(sizes):
        count = 1 + seed % (1 + drafts)
        step = step_of(stages, size, count, seed) if size else None
        late = torch.arange(6, dtype=torch.int32) % 2 if seed % 3 == 1 else None
        fresh, num_rows = rows_of(stages, drafts), max(size * count, 1) + 1
        for each in (used, fresh):
            each.set(step, min(num_rows, used.max_rows), max(size, 1), late)
        for mine, theirs in zip(used.buffers, fresh.buffers, strict=True):
            assert torch.equal(mine, theirs), (seed, size)
        filled |= bool(used.buffers[0].any())
    assert filled
