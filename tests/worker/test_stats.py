"""Counters while a prompt comes in: they never fall, and end at what was computed and spared."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_kvx.ops.retrieval.costs import Costs, StepCosts
from vllm_kvx.policy.retrieval_layers import OF_PAPERS, RetrievalLayers
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.storage import storage_of
from vllm_kvx.worker.decode.step import Mode, RetrievalPass, RetrievalStep, Rules
from vllm_kvx.worker.prefill.chunks import PromptChunk, PromptState
from vllm_kvx.worker.stats import PolicyStats
from vllm_kvx.worker.step import Step

LAYERS, BLOCK = 32, 16
NONE = np.zeros(1, dtype=np.int64)  # Of drafts, it is known which stay.
COSTS = StepCosts(Costs(whole=0, whole_entry=4, fixed=0, scored=1, read=2))


@pytest.mark.parametrize(
    ("name", "computed"),
    [
        ("fastkv:kv_floor=0,tsp_layer=15", lambda n: 16 * n + 16 * int(0.2 * n)),
        ("gemfilter:layer=13,kv_floor=0", lambda n: 14 * n + 32 * int(0.1 * n)),
        # The rerun takes more than it saves.
        ("gemfilter:layer=20,rate=0.4,kv_floor=0", lambda n: 21 * n + 32 * int(0.4 * n)),
        ("gemfilter:layer=30,rate=0.1,kv_floor=0", lambda n: 31 * n + 32 * int(0.1 * n)),
    ],
)
@pytest.mark.parametrize("length", [8200, 40_000])
def test_totals_never_fall(name: str, computed: Any, length: int) -> None:
    policy = parse_policy(name)
    cut = policy.selection(length, LAYERS).after + 1  # type: ignore[union-attr]
    stats = PolicyStats((cut, LAYERS - cut))
    row = stats.row_of(policy)
    storages = [storage_of(policy, length, start, BLOCK, LAYERS) for start in (0, cut)]
    state = PromptState.of("a", policy, length, (0, cut), storages, LAYERS)
    assert state is not None
    requests: Any = SimpleNamespace(policy_rows=np.array([row]), prompt_lens=np.array([length]))
    seen = []
    for begin in range(0, length, 8192):
        end = min(begin + 8192, length)
        count = np.array([end - begin])
        chunk = PromptChunk(state, 0, begin, end)
        nothing: Any = None
        step = Step(nothing, np.array([0]), np.array([begin]), count, [], nothing, [chunk], nothing)
        stats.add_step(step, requests, [(cut, count)])
        counters = stats.as_dict()[str(policy)]
        seen.append([counters[f"layer_tokens_{what}"] for what in ("computed", "skipped")])
    for before, after in pairwise(seen):
        assert before[0] <= after[0] and before[1] <= after[1]
    assert seen[-1] == [computed(length), max(LAYERS * length - computed(length), 0)]


def test_dense_layers_are_the_models_first_ones() -> None:
    """Of a pipeline the ranks count their own layers, and together what one rank would."""
    policy = parse_policy("fier-64:dense_below=0")
    seen, budgets = np.array([[100, 0], [90, 0]]), np.array([64, 64])

    def counted(sizes: tuple[int, int], first: int) -> np.ndarray:
        stats = PolicyStats(sizes, first_layer=first)
        row = stats.row_of(policy)
        stats.add_retrieval(np.array([row, row]), seen, seen, budgets, seen < 0)
        return stats.retrieval[row]

    whole = counted((3, 5), 0)
    assert whole.tolist() == [300 + 450, 100 + 450, 2 * 100 + 6 * 64, 1, 0]
    for cut in range(1, 8):
        below, above = (min(3, cut), max(cut - 3, 0)), (max(3 - cut, 0), min(8 - cut, 5))
        ranks = counted(below, 0), counted(above, cut)
        assert (ranks[0] + ranks[1])[:3].tolist() == whole[:3].tolist()


@pytest.mark.parametrize("dense", [2, 3, 5, 7, 8, 128])
def test_a_step_that_reads_every_layer_whole_does_not_retrieve(dense: int) -> None:
    """Whatever the lengths say; of a pipeline each rank counts so, one with dense layers alone too.

    Above layer 5 the second request has too few entries to choose from.
    """
    policy = parse_policy(f"fier-64:dense_below=0,dense_layers={dense}")
    seen = np.array([[100, 100], [90, 3]])
    lens, budgets = np.array([[100, 100], [90, 0]]), np.array([64, 64])
    rule = RetrievalLayers(dense)
    steps = int(dense < 8) + int(dense < 5)
    for sizes, first in (((5, 3), 0), ((4, 0), 0), ((1, 3), 4), ((0, 2), 6)):
        reads_parts = rule.in_stages((0, 5), 8)
        stats = PolicyStats(sizes, first_layer=first, retrieving=rule, reads_parts=reads_parts)
        for each in (stats, stats.anew(stats.policies)):
            row = each.row_of(policy)
            each.add_retrieval(np.array([row, row]), seen, lens, budgets, seen < 0)
            assert each.retrieval[row][3:].tolist() == [steps, 2 - steps]


def test_layers_that_read_by_anothers_choice_score_nothing() -> None:
    """Of layers 2 to 7 by threes 2 and 5 choose; of a rank from layer 4 on its first one, too."""
    seen, budgets = np.array([[100], [90]]), np.array([64])
    for first, expected in ((0, 100 + 90), (4, 100 + 90)):
        stats = PolicyStats(
            (5, 3) if first == 0 else (1, 3), first_layer=first, retrieving=RetrievalLayers(reuse=3)
        )
        row = stats.row_of(parse_policy("fier-64:dense_below=0,reuse_layers=3"))
        stats.add_retrieval(np.array([row]), seen, seen, budgets, seen < 0)
        assert stats.retrieval[row][1] == expected
        assert stats.anew(stats.policies).retrieving == RetrievalLayers(reuse=3)


def test_layers_score_for_themselves_where_choices_are_not_kept() -> None:
    """Six layers of 5 and 3 retrieve, and by threes two would choose."""
    seen, budgets = np.array([[100, 70], [90, 70]]), np.array([64, 64])
    stats = PolicyStats((5, 3), retrieving=RetrievalLayers(reuse=3))
    row = stats.row_of(parse_policy("fier-64:dense_below=0,reuse_layers=3"))
    rows, none = np.array([row, row]), seen < 0
    stats.add_retrieval(rows, seen, seen, budgets, ~none)
    assert stats.retrieval[row][1] == 3 * 100 + 3 * 90 + 6 * 70
    read = stats.retrieval[row][2]
    stats.add_retrieval(rows, seen, seen, budgets, none)
    assert stats.retrieval[row][1:3].tolist() == [990 + 100 + 90 + 2 * 70, 2 * read]
    rows_of_3: Any = SimpleNamespace(lens=np.zeros(3))
    several = [[rows_of_3], [rows_of_3] * 2]
    for most, chooses in ((0, True), (5, True), (6, False)):
        found = RetrievalPass((Mode.ALL, Mode.ALL), several, [], most_chosen=most)
        assert found.each_chooses.tolist() == [False, chooses]


def test_each_drafted_token_that_retrieves_counts() -> None:
    """And so do the ones that read all; a request that resumes has counted its tokens before."""
    ends, counts = np.array([102, 200, 300]), np.array([4, 4, 4])
    rules = Rules(np.full(3, 32), np.full(3, 100), np.full(3, 100), 1)
    prompts, none = np.array([50, 50, 50]), np.zeros(3, dtype=bool)
    found = RetrievalStep.of(rules, COSTS, NONE, ends - counts, counts, prompts, ends[None], none)
    step: Any = SimpleNamespace(
        batch=SimpleNamespace(num_draft_tokens_per_req=np.array([3, 3, 0])),
        requests=np.arange(3),
        begins=ends - counts,
        ends=ends,
        stored_lens=ends[None],
        retrieval=found,
    )
    requests: Any = SimpleNamespace(policy_rows=np.zeros(3, dtype=int), prompt_lens=prompts)
    stats = PolicyStats((LAYERS,))
    stats.add_retrieval_step(step, requests, 1, None)
    held = sum(range(99, 103)) + sum(range(197, 201))
    layers = LAYERS - OF_PAPERS.dense
    counted = stats.retrieval[0].tolist()
    assert counted[0] == LAYERS * held and counted[1] == layers * (held - 99)
    assert counted[2] == OF_PAPERS.dense * held + layers * (99 + 7 * 32)
    assert counted[3:] == [7, 1]
