"""Graphs of passes that draft: numbers of rows, padding, and what a graph cannot do."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_kvx.worker import row_graphs
from vllm_kvx.worker.batch import PassBatch
from vllm_kvx.worker.decode.draft_pass import DraftReads
from vllm_kvx.worker.draft_rows import RowPass
from vllm_kvx.worker.prefill.score_and_move import PassWork
from vllm_kvx.worker.prefill.scoring import WindowRows
from vllm_kvx.worker.row_graph_work import GraphReads, KeptQueries
from vllm_kvx.worker.row_graphs import RowBuffers, capture_row_graphs, row_graphs_of

CPU = torch.device("cpu")
GROUPS, WIDTH = 2, 3


def row_pass(num_rows: int, **more: Any) -> RowPass:
    """Rows that see 11, 12 and so on entries; each has tables and slots of its own."""
    attn: Any = None
    index = torch.arange(num_rows)
    tables = tuple((index[:, None] + 10 * g).expand(-1, WIDTH).int() for g in (1, 2))
    slots = torch.stack([index + 100 * g for g in (1, 2)])
    ones = np.ones(num_rows, dtype=np.int32)
    batch = PassBatch(np.arange(num_rows), ones, index + 10, tables, slots)
    lens = (index + 11).int()
    return RowPass(attn, batch, lens, lens.numpy(), **more)


def test_numbers_of_rows() -> None:
    """They are vLLM's, and a pass takes the least that has room."""
    sizes = row_graphs.sizes_of([512, 16, 1, 2, 8, 4], 8)
    assert sizes == [1, 2, 4, 8]
    assert [row_graphs.size_of(rows, sizes) for rows in (1, 3, 8, 9)] == [1, 4, 8, None]
    assert row_graphs.sizes_of([16], 8) == [] and row_graphs.size_of(1, []) is None


def test_rows_that_are_nobodys() -> None:
    """They store nothing and see nothing, whatever stood there before."""
    buffers = RowBuffers(8, [WIDTH] * GROUPS, CPU)
    buffers.set(torch.arange(7), row_pass(7), 8)
    now = row_pass(3)
    buffers.set(torch.tensor([5, 6, 7], dtype=torch.int32), now, 4)
    inputs = buffers.inputs
    assert inputs.input_ids[:3].tolist() == [5, 6, 7]
    assert inputs.positions[:3].tolist() == [10, 11, 12]
    assert inputs.seq_lens[:4].tolist() == [11, 12, 13, 0]
    assert inputs.query_start_loc[:5].tolist() == [0, 1, 2, 3, 3]
    assert inputs.is_padding[:4].tolist() == [False, False, False, True]
    tables, slots = buffers.first(4)
    assert slots.tolist() == [[100, 101, 102, PAD_SLOT_ID], [200, 201, 202, PAD_SLOT_ID]]
    for mine, theirs in zip(tables, now.batch.block_tables, strict=True):
        assert torch.equal(mine[:3], theirs)


def test_the_next_pass_follows() -> None:
    """Rows move on by a token, into the slots of their tables; the longest context has no more."""
    buffers = RowBuffers(4, [WIDTH] * GROUPS, CPU)
    buffers.set(torch.arange(3), row_pass(3), 4)
    for limit, seen in ((100, [12, 13, 14]), (14, [13, 14, 14])):
        buffers.advance(torch.tensor([7, 8, 9, 1], dtype=torch.int32), limit, [16, 8])
        inputs = buffers.inputs
        assert inputs.input_ids[:3].tolist() == [7, 8, 9]
        assert inputs.positions[:3].tolist() == [length - 1 for length in seen]
        assert inputs.seq_lens[:4].tolist() == [*seen, 0]
        assert buffers.first(4)[1].tolist() == [
            [(row + 10 * g) * size + (length - 1) % size for row, length in enumerate(seen)]
            + [PAD_SLOT_ID]
            for g, size in ((1, 16), (2, 8))
        ]


class Kept:
    """What ``KeptQueries`` reads of ``PrefillBuffers``."""

    def __init__(self) -> None:
        self.queries = torch.zeros(4, 2, 5, 2, 8)
        self.device = CPU


def kept_pass(*, is_last: bool = False) -> RowPass:
    """Three rows that keep their queries in slots 3, 1 and 2; the last pass scores, too."""
    windows = WindowRows(torch.arange(3), torch.tensor([3, 1, 2]), torch.tensor([4, 0, 2]))
    prompts: Any = [SimpleNamespace(stats_row=0, num_keys=9)] if is_last else []
    memory: Any = Kept()
    return row_pass(3, work=PassWork(prompts, windows, (), memory))


def test_queries_are_kept_where_prompts_have_room() -> None:
    memory: Any = Kept()
    kept, query = KeptQueries(memory), torch.randn(4, 2, 8)
    now = kept_pass()
    kept.set(kept.plan(now, 4), 4)
    work, _ = kept.beside(4, ())
    hook: Any = SimpleNamespace(place=1)
    paged: Any = None
    work.run(hook, query, paged)
    expected = torch.zeros_like(memory.queries)
    for row, slot, place in ((0, 3, 4), (1, 1, 0), (2, 2, 2)):
        expected[slot, 1, place] = query[row]
    assert torch.equal(memory.queries, expected)


def test_passes_that_score_have_no_graph() -> None:
    memory: Any = Kept()
    kept = KeptQueries(memory)
    assert kept.most_rows == 4 and kept.plan(kept_pass(), 4) is not None
    for other in (kept_pass(is_last=True), row_pass(3), row_pass(3, reads=reads(3))):
        assert kept.plan(other, 4) is None


def reads(num_rows: int) -> DraftReads:
    most = np.arange(num_rows) + 11
    return DraftReads(np.arange(num_rows) + 5, most, most, 4)


class Retrieval:
    """What ``GraphReads`` asks of ``Retrieval``, with room for some entries."""

    def __init__(self, full: list[list[int]], room: int) -> None:
        self.layout = SimpleNamespace(group=32, unit=1)
        self.full, self.room = full, room
        self.sidecars = SimpleNamespace(groups_of_drafts=self._groups)

    def _groups(self, *_: Any) -> np.ndarray | None:
        return np.array(self.full, dtype=np.int32) if self.full else None

    def fits(self, lens: np.ndarray) -> bool:
        return int(lens.sum()) <= self.room


def graph_reads(full: list[list[int]], room: int = 100) -> GraphReads:
    retrieval: Any = Retrieval(full, room)
    return GraphReads(retrieval, 4, 4, CPU)


def test_reads_and_full_groups() -> None:
    """Of rows and groups that are nobody's nothing is read and nothing written."""
    work = graph_reads([[0, 7, 1]])
    plan = work.plan(row_pass(3, reads=reads(3)), 4)
    assert plan is not None
    _, retrieves = work.beside(4, ())
    ((rows,),) = retrieves.batches
    assert retrieves.writes and retrieves.full_groups is not None
    work.set(plan, 4)
    lens, is_padding = torch.tensor([11, 12, 13, 9]), torch.tensor([False, False, False, True])
    work.see(lens, is_padding)
    assert rows.lens.tolist() == [11, 12, 13, 0] and rows.budgets.tolist() == [4, 4, 4, 0]
    assert rows.tokens.tolist() == rows.requests.tolist() == [0, 1, 2, 0]
    assert rows.offsets.tolist() == [0, 12, 24, 0]
    assert retrieves.full_groups.tolist() == [[0, 7, 1]] + [[-1] * 3] * 3
    work.set(None, 4)
    work.see(lens, torch.ones(4, dtype=torch.bool))
    assert not rows.lens.any() and not rows.budgets.any()
    assert (retrieves.full_groups == -1).all()


def test_reads_that_have_no_graph() -> None:
    """Scores or groups of the index that do not fit, and passes that read all entries."""
    now = row_pass(3, reads=reads(3))
    assert graph_reads([], room=30).plan(now, 4) is None
    assert graph_reads([[0, 5, 1]] * 5).plan(now, 4) is None
    assert graph_reads([]).plan(row_pass(3), 4) is None


class Manager:
    """What ``capture_row_graphs`` touches of vLLM's ``CudaGraphManager``."""

    def __init__(self, mode: CUDAGraphMode) -> None:
        self.cudagraph_mode = mode
        self._capture_descs = {CUDAGraphMode.FULL: ["8", "4"]}
        self._max_full_descs_to_capture: int | None = None
        self.captured: list[str] = []

    def capture(self, what: str) -> None:
        self.captured.append(what)


class Graphs:
    """What it captures after them."""

    sizes = (1, 2, 4)

    def __init__(self, captured: list[str]) -> None:
        self._captured = captured

    def capture(self, most: int | None = None) -> None:
        self._captured += ["4", "2", "1"][:most]

    def forget_cache(self) -> None:
        self._captured.append("forgotten")


def runner_of(
    monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE
) -> Any:
    """A runner that has its KV cache."""
    runner: Any = SimpleNamespace()

    def initialize_kv_cache() -> None:
        runner.cudagraph_manager = Manager(mode)

    runner.initialize_kv_cache = initialize_kv_cache
    settings: Any = None
    monkeypatch.setattr(
        row_graphs, "graphs_of", lambda *_: [Graphs(runner.cudagraph_manager.captured)]
    )
    capture_row_graphs(runner, settings)
    runner.initialize_kv_cache()
    return runner


def test_captured_after_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(monkeypatch)
    assert not row_graphs_of(runner)
    runner.cudagraph_manager.capture("theirs")
    assert runner.cudagraph_manager.captured == ["theirs", "4", "2", "1"]
    assert len(row_graphs_of(runner)) == 1
    # The graphs of one KV cache are not those of the next.
    runner.initialize_kv_cache()
    assert not row_graphs_of(runner)


def test_memory_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is measured, and vLLM reserves for the others what one of its own takes."""
    manager = runner_of(monkeypatch).cudagraph_manager
    manager._max_full_descs_to_capture = 2
    manager.capture("theirs")
    assert manager.captured == ["theirs", "4", "forgotten"]
    count = len(manager._capture_descs[CUDAGraphMode.FULL])
    assert count == 2 + 2
    estimate = cudagraph_utils._extrapolate_full_graph_memory([100 << 20, 5 << 20], count)
    assert estimate == (100 + 3 * 5) << 20


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_none_where_decode_steps_have_none(
    monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode
) -> None:
    runner = runner_of(monkeypatch, mode)
    runner.cudagraph_manager.capture("theirs")
    assert runner.cudagraph_manager.captured == ["theirs"] and not row_graphs_of(runner)
