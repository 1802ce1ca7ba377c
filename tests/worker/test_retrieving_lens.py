"""Which rows of a step retrieve: by their own length, or since the step's batch pays."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_kvx.ops.retrieval.costs import Costs, StepCosts
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.policy.storage import stored_lens
from vllm_kvx.worker.decode.retrieval import Retrieval
from vllm_kvx.worker.decode.step import Mode, RetrievalStep, Rules, retrieving_lens, still_unknown

# In entries, not Ki: a row saves 3 per entry less 2 per token read; retrieval costs 3000 at all,
# and stock attention 1000.
COSTS = Costs(whole=1000, whole_entry=4 * 1024, fixed=3000, scored=1024, read=2 * 1024)
EVERY = StepCosts(COSTS)
NONE = np.zeros(1, dtype=np.int64)  # Drafted tokens that may be gone.
BUDGET, LEAST, FLOOR = 30, 31, 900


def rules(
    size: int, budget: int = BUDGET, floors: Sequence[int] | None = None, unit: int = 1
) -> Rules:
    least = np.full(size, LEAST)
    alone = np.full(size, FLOOR) if floors is None else np.array(floors)
    return Rules(np.full(size, budget // unit), np.minimum(least, alone), alone, unit)


def lens_of(stored: Sequence[int], mine: Rules, generates: Sequence[bool] = ()) -> list[int]:
    may = np.array(generates or [True] * len(stored))
    (found,) = retrieving_lens(mine, COSTS, may, np.array([stored]))
    return found.tolist()


@pytest.mark.parametrize("unit", [1, 10])
def test_the_batch_decides(unit: int) -> None:
    """One request saves 3 x 600 - 2 x 30 = 1740 of the 2000 that it would have to, two 3480."""
    assert lens_of([600], rules(1, unit=unit)) == [0]
    assert lens_of([600, 600], rules(2, unit=unit)) == [600, 600]
    # Exactly where it begins to pay: 3 n - 60 > 2000.
    assert lens_of([686], rules(1)) == [0] and lens_of([687], rules(1)) == [687]
    assert COSTS.pays_from(BUDGET, 1) == 687


def test_stock_attention_runs_for_one_that_does_not_retrieve() -> None:
    """Then 3000 have to be saved: by 3 x 700 - 60 = 2040 each."""
    full = Rules(np.array([BUDGET, 0]), np.array([LEAST, 0]), np.array([FLOOR, 0]), 1)
    assert lens_of([700], rules(1)) == [700]
    assert lens_of([700, 500], full, [True, False]) == [0, 0]
    assert lens_of([700, 700, 25], rules(3)) == [700, 700, 0]  # The last one is too short.


def test_rows_that_do_not_save_stay_whole() -> None:
    """Where others pay, a row retrieves if that saves anything: 3 n > 2 x 30."""
    big = rules(3, floors=[FLOOR] * 3)
    assert lens_of([2000, 32, 31], big) == [2000, 32, 31]
    assert lens_of([2000, 32, 31], rules(3, budget=50)) == [2000, 0, 0]


def test_lengths_decide_where_the_policy_says_so() -> None:
    """An explicit `dense_below`: no batch makes a shorter context retrieve."""
    named = Rules(np.full(3, BUDGET), np.full(3, 650), np.full(3, 650), 1)
    assert lens_of([649, 650, 600], named) == [0, 650, 0]
    # Beside it others retrieve for what they save themselves.
    beside = Rules(np.full(2, BUDGET), np.array([650, LEAST]), np.array([650, FLOOR]), 1)
    assert lens_of([650, 40], beside) == [650, 40]
    assert lens_of([649, 600], beside) == [0, 0]


def test_stages_decide_for_themselves() -> None:
    """Those of a policy that drops entries hold fewer."""
    stored = np.array([[600, 600], [600, 40]])
    found = retrieving_lens(rules(2), COSTS, np.array([True, True]), stored)
    assert found.tolist() == [[600, 600], [0, 0]]


def test_too_few_entries_were_measured() -> None:
    """What retrieves has to have as many in all, unless others do so by themselves."""
    costs = replace(COSTS, least=2000)
    for stored, floor, retrieve in (
        ([800], FLOOR, False),
        ([800, 1199], 1300, False),
        ([800, 1200], 1300, True),
        ([800, 1200], FLOOR, True),
        ([800, 1000], FLOOR, True),
    ):
        found = retrieving_lens(
            rules(len(stored), floors=[floor] * len(stored)),
            costs,
            np.ones(len(stored), dtype=bool),
            np.array([stored]),
        )
        assert (found[0, 0] > 0) == retrieve, (stored, floor)
    assert costs.pays_from(BUDGET, 1) == 2000 and costs.pays_from(BUDGET, 3) == 667


def test_a_step_of_few_rows_has_costs_of_its_own() -> None:
    """Drafted tokens are rows, and so are a prompt's."""
    few = StepCosts(COSTS, replace(COSTS, fixed=1000), few_rows=2)
    ends, prompts = np.array([300, 300]), np.array([200, 200])

    def lens(count: int, others: Sequence[int] = ()) -> list[int]:
        size, counts = 1 + len(others), np.array([count, *others])
        step = RetrievalStep.of(
            rules(size), few, NONE, ends[:size] - counts, counts, prompts[:size], ends[None, :size],
            np.zeros(size, dtype=bool),
        )  # fmt: skip
        return step.lens[0].tolist()

    assert lens(1) == [300] and lens(1, [1]) == [300, 300]
    # Three rows: 3 x 300 - 60 are not the 2000 that it would have to save.
    assert lens(1, [2]) == [0, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_what_a_step_runs_is_what_was_asked_before_it(size: int) -> None:
    """Whether a step can replay a graph is asked by the costs that it is planned by."""
    few = StepCosts(COSTS, replace(COSTS, fixed=1000), few_rows=2)
    requests, ends = np.arange(size), np.full(size, 240)
    prompts, counts = np.full(size, 200), np.ones(size, dtype=np.int64)
    server: Any = SimpleNamespace(rules=rules(size), costs=few)
    asked = Retrieval.lens_of(server, requests, ends, prompts, ends[None])
    step = RetrievalStep.of(
        rules(size), few, NONE, ends - counts, counts, prompts, ends[None],
        np.zeros(size, dtype=bool),
    )  # fmt: skip
    assert asked.tolist() == step.lens.tolist() == [[240 if size != 3 else 0] * size]


def test_what_a_step_runs() -> None:
    """Tokens that run again after preemption read by length alone, whoever else runs."""
    ends, prompts = np.array([600, 600, 600]), np.array([500, 500, 590])
    counts = np.array([1, 1, 6])
    step = RetrievalStep.of(
        rules(3), EVERY, NONE, ends - counts, counts, prompts, ends[None], np.zeros(3, dtype=bool)
    )
    assert step.chunks == [2] and step.lens.tolist() == [[600, 600, 0]]
    rows = step.rows(0, counts, ends - counts, ends, prompts, (np.zeros(3, int), np.zeros(3, int)))
    assert rows.tokens.tolist() == [0, 1]
    two = RetrievalStep.of(
        rules(2),
        EVERY,
        NONE,
        *(each[:2] for each in (ends - counts, counts, prompts)),
        ends[None, :2],
        np.zeros(2, dtype=bool),
    )
    assert two.modes == (Mode.ALL,)


def test_each_drafted_token_retrieves_by_itself() -> None:
    """From its own length on; stock attention is spared where all tokens of a request do."""
    ends, counts = np.array([902, 1000, 1000]), np.array([4, 4, 4])
    prompts, no_gap = np.array([100, 100, 998]), (np.zeros(3, int), np.zeros(3, int))
    step = RetrievalStep.of(
        rules(3), EVERY, NONE, ends - counts, counts, prompts, ends[None], np.zeros(3, dtype=bool)
    )
    assert step.chunks == [0, 1, 2] and step.whole.tolist() == [[0, 4, 0]]
    assert step.modes == (Mode.MIXED,)
    rows = step.rows(0, counts, ends - counts, ends, prompts, no_gap)
    assert rows.lens.tolist() == [900, 901, 902, *range(997, 1001), 999, 1000]
    assert rows.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 10, 11]
    short, long = (
        RetrievalStep.of(
            rules(1),
            EVERY,
            NONE,
            np.array([end - 4]),
            np.array([4]),
            np.array([100]),
            np.array([[end]]),
            np.zeros(1, dtype=bool),
        )
        for end in (899, 903)
    )
    assert short.modes == (Mode.DENSE,) and long.modes == (Mode.ALL,)


def test_a_floor_among_drafts_that_may_be_gone() -> None:
    """Rows may retrieve, so both run; the device knows which do, and takes off what is gone."""
    ends, counts = np.array([902, 903, 905, 909]), np.array([1, 4, 4, 4])
    prompts, no_gap = np.full(4, 100), (np.zeros(4, int), np.zeros(4, int))
    step = RetrievalStep.of(
        rules(4), EVERY, np.array([3, 0, 3, 3]), ends - counts, counts, prompts, ends[None],
        np.zeros(4, dtype=bool),
    )  # fmt: skip
    assert step.whole.tolist() == [[0, 4, 0, 4]] and step.modes == (Mode.MIXED,)
    rows = step.rows(0, counts, ends - counts, ends, prompts, no_gap)
    budgets, floors = step.budgets[rows.requests], step.floors_of(rows.requests, rows.lens)
    found = RetrievalRows.of(rows.tokens, rows.requests, rows.lens, budgets, 1, torch.device("cpu"))
    found.take_back(torch.tensor([3, 0, 2, 1], dtype=torch.int32), torch.from_numpy(floors))
    assert found.lens.tolist() == [0, *range(900, 904), *range(900, 904), *range(905, 909)]


def test_a_request_that_a_step_passed_over() -> None:
    """What it drafted before is known by then: no entry of its prompt counts as perhaps gone."""
    drafted, begins, prompts = np.array([5, 5, 5]), np.array([2, 800, 50]), np.array([1, 100, 100])
    unknown = still_unknown(drafted, begins, prompts)
    assert unknown.tolist() == [1, 5, 0]
    counts = np.array([6, 6, 6])
    step = RetrievalStep.of(
        rules(3), EVERY, unknown, begins, counts, prompts, (begins + counts)[None],
        np.zeros(3, dtype=bool),
    )  # fmt: skip
    # From here on groups of the index are written, of which there is none before the first.
    assert (step.sees - counts - step.unknown).tolist() == [[1, 795, 50]]


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_graphs_are_those_of_steps_in_python(seed: int) -> None:
    """A graph has a row for each token; those that a step in Python leaves out see nothing."""
    rng = np.random.default_rng(seed)
    size, stages = int(rng.integers(1, 7)), int(rng.integers(1, 3))
    counts = rng.integers(1, 6, size)
    prompts = rng.integers(600, 1000, size)
    begins = prompts + rng.integers(-1, 200, size)
    ends = begins + counts
    gaps = rng.integers(0, 2, (2, stages, size)) * rng.integers(1, 100, (2, stages, size))
    seen = np.stack([stored_lens(ends, *gaps[:, stage]) for stage in range(stages)])
    step = RetrievalStep.of(
        rules(size), EVERY, NONE, begins, counts, prompts, seen, np.zeros(size, dtype=bool)
    )
    requests, lens = step.each_row
    for stage in range(stages):
        rows = step.rows(stage, counts, begins, ends, prompts, (gaps[0, stage], gaps[1, stage]))
        expected = np.zeros(counts.sum(), dtype=np.int64)
        expected[rows.tokens] = rows.lens
        assert lens[stage].tolist() == expected.tolist()
        assert requests[rows.tokens].tolist() == rows.requests.tolist()
