"""Queries that CUDA graphs keep: whose, where, and in which steps."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  vLLM's stand-ins for pinned memory.
from vllm.config.compilation import CUDAGraphMode

from vllm_kvx.policy.layout import layout_of
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.worker.prefill.chunks import PromptChunk
from vllm_kvx.worker.prefill.score_and_move import PrefillBuffers
from vllm_kvx.worker.prefill.stash import Stash
from vllm_kvx.worker.requests import Requests
from vllm_kvx.worker.split_layers import Cuts
from vllm_kvx.worker.step import needs_python
from vllm_kvx.worker.waiting_queries import WaitingQueries

LAYERS, HEADS, HEAD_DIM = 2, 2, 8
WAITS = parse_policy("snapkv:window=2,kernel=1,kv_rate=0.5,kv_floor=0,after=4")
SELECTS = parse_policy("snapkv:window=2,kernel=1,kv_rate=0.5,kv_floor=0")
PROMPT, SLOTS = 10, 3


@pytest.fixture
def requests() -> Requests:
    """Two that wait, one whose prompt is scored when it is in, and one that nobody looks at."""
    layout = layout_of([WAITS], LAYERS)
    requests = Requests(layout, Cuts((0,), frozenset()), LAYERS, 4, SLOTS, None)
    for index, policy in enumerate((WAITS, WAITS, SELECTS, parse_policy("full"))):
        requests.add(index, str(index), policy, PROMPT, 16, 0)
    return requests


def buffers(has_spare: bool = True) -> PrefillBuffers:
    layer: Any = SimpleNamespace(num_heads=HEADS, num_kv_heads=HEADS, head_size=HEAD_DIM)
    size = SLOTS, layout_of([WAITS], LAYERS).window, torch.float32, torch.device("cpu"), 1
    memory = PrefillBuffers([layer] * LAYERS, *size, has_spare)
    memory.all_queries.zero_()
    return memory


def step_of(chunks: Sequence[PromptChunk], counts: Sequence[int]) -> Any:
    return SimpleNamespace(chunks=chunks, counts=np.array(counts))


def planned(requests: Requests, indices: list[int], begins: list[int], counts: list[int]) -> Any:
    begin = np.array(begins)
    chunks = requests.chunks(np.array(indices), begin, begin + counts)
    return step_of(chunks, counts)


def kept_by(waiting: WaitingQueries, num_rows: int, place: int = 1) -> torch.Tensor:
    """The queries of the rows, once a layer's graph has run over them."""
    query = torch.randn(num_rows, HEADS, HEAD_DIM)
    paged: Any = None
    waiting.run(SimpleNamespace(place=place), query, paged)
    return query


def test_rows_that_wait_keep_their_queries(requests: Requests) -> None:
    """In the places that follow the window's; other rows and padding leave all as it was."""
    memory = buffers()
    waiting = WaitingQueries(memory, 8)
    step = planned(requests, [3, 1, 0], [50, PROMPT + 2, PROMPT], [1, 1, 1])
    slots = [requests.prompts[index].slot for index in (1, 0)]
    work = waiting.beside(step, CUDAGraphMode.FULL, 4, False)
    assert work is waiting and waiting.keeps
    query = kept_by(waiting, 4)
    expected = torch.zeros_like(memory.queries)
    expected[slots[0], 1, 4], expected[slots[1], 1, 2] = query[1], query[2]
    assert torch.equal(memory.queries, expected)


def test_what_the_step_before_kept_is_not_kept_again(requests: Requests) -> None:
    memory = buffers()
    waiting = WaitingQueries(memory, 8)
    step = planned(requests, [0, 1], [PROMPT, PROMPT], [1, 1])
    waiting.beside(step, CUDAGraphMode.FULL, 2, False)
    kept_by(waiting, 2)
    before = memory.queries.clone()
    step = planned(requests, [3, 0], [70, PROMPT + 1], [1, 1])
    waiting.beside(step, CUDAGraphMode.FULL, 4, False)
    query = kept_by(waiting, 4)
    before[requests.prompts[0].slot, 1, 3] = query[1]
    assert torch.equal(memory.queries, before)


def test_rows_of_drafted_tokens(requests: Requests) -> None:
    """Each request has several rows; those of rejected tokens are written again."""
    memory = buffers()
    waiting = WaitingQueries(memory, 8)
    step = planned(requests, [3, 0], [50, PROMPT], [2, 2])
    waiting.beside(step, CUDAGraphMode.FULL, 6, False)
    query = kept_by(waiting, 6)
    kept = memory.queries[requests.prompts[0].slot, 1]
    assert torch.equal(kept[2:4], query[2:4]) and not kept[4:].any()
    waiting.beside(planned(requests, [0], [PROMPT + 1], [2]), CUDAGraphMode.FULL, 2, False)
    again = kept_by(waiting, 2)
    assert torch.equal(kept[2], query[2]) and torch.equal(kept[3:5], again)


def test_captured_graphs_keep_nothing() -> None:
    """They write to the slot that nobody reads, and dummy batches replay stock graphs."""
    memory = buffers()
    waiting = WaitingQueries(memory, 8)
    waiting.keeps = True  # As ``capture_sets`` says.
    for _ in range(2):  # Warmed up, then captured.
        assert waiting.beside(None, CUDAGraphMode.NONE, 4, True) is waiting
        kept_by(waiting, 4)
    assert not memory.queries.any() and memory.all_queries[SLOTS].any()
    assert waiting.beside(None, CUDAGraphMode.FULL, 4, False) is None and not waiting.keeps


def test_steps_that_run_without_a_graph_keep_queries_otherwise(requests: Requests) -> None:
    waiting = WaitingQueries(buffers(), 8)
    step = planned(requests, [0], [PROMPT], [1])
    assert waiting.beside(step, CUDAGraphMode.NONE, 1, False) is None
    assert waiting.beside(step_of([], [1]), CUDAGraphMode.FULL, 1, False) is None
    assert not waiting.keeps


def test_no_room_where_no_policy_waits() -> None:
    memory = buffers(has_spare=False)
    assert not WaitingQueries(memory, 8).in_graphs
    assert memory.all_queries.shape == memory.queries.shape


@pytest.mark.parametrize(
    ("index", "begin", "count", "replays"),
    [
        (0, PROMPT, 1, True),
        (0, PROMPT + 2, 1, True),
        # The last token that it waits for: keys are scored.
        (0, PROMPT + 3, 1, False),
        (0, PROMPT, 3, True),
        (0, PROMPT + 1, 3, False),
        # One token of a prompt.
        (0, PROMPT - 1, 1, False),
        (0, 0, 1, False),
        (2, PROMPT - 1, 1, False),
        (3, PROMPT - 1, 1, True),
    ],
)
def test_which_steps_replay_graphs(
    requests: Requests, index: int, begin: int, count: int, replays: bool
) -> None:
    """One that does not keeps all others of its step from it."""
    indices, begins = np.array([3, 1, index]), np.array([50, PROMPT + 1, begin])
    counts = np.array([1, 1, count])
    assert needs_python(requests, None, True, indices, begins, counts) != replays
    if index < 3:
        assert needs_python(requests, None, False, indices, begins, counts)


def test_a_prompt_whose_tokens_were_chosen_before() -> None:
    """It waits with the window's queries in the same slot, and without its states."""
    name = "fastkv:window=2,kernel=1,tsp_layer=0,tsp_rate=0.5,kv_rate=0.3,kv_floor=0,after=4"
    policy = parse_policy(name)
    stash = Stash(PROMPT, 4, torch.float32, torch.device("cpu"))
    requests = Requests(
        layout_of([policy], LAYERS), Cuts((0, 1), frozenset()), LAYERS, 1, SLOTS, stash
    )
    requests.add(0, "a", policy, PROMPT, 16, 0)
    index, begins = np.array([0]), np.array([0])
    (chunk,) = requests.chunks(index, begins, begins + PROMPT)
    first = requests.prompts[0]
    assert chunk.is_last and chunk.splits_window and first.window == 2 and not first.cut_to
    assert first.selection is not None and first.retain is None and stash.used_tokens
    requests.compact(0, first.storages)
    assert requests.stored_lens(index, np.array([PROMPT])).tolist() == [[PROMPT], [PROMPT // 2]]
    requests.end_prompts(index, [chunk])
    then = requests.prompts[0]
    assert then is first.then and then.slot == first.slot and not stash.used_tokens
    assert len(requests.free_windows) == SLOTS - 1
    assert requests.only_wait(index, begins + PROMPT + 2, np.array([1]))
    (chunk,) = requests.chunks(index, begins + PROMPT + 3, begins + PROMPT + 4)
    assert chunk.is_last and then.window == 6 and then.runs_whole(1)
    prompt = then.in_direct_pass(0, 0, chunk.begin, chunk.splits_window)
    keys = [(each.num_keys, each.kept[1]) for each in map(prompt.in_stage, (0, 1))]
    assert keys == [(PROMPT + 4, 3 + 4), (PROMPT // 2 + 4, 3 + 4)]
    requests.end_prompts(index, [chunk])
    assert not requests.prompts and len(requests.free_windows) == SLOTS
