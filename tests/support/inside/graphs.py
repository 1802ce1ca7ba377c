"""Graphs of retrieval and of drafts, and stand-ins for them on CPU."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from support.inside.runner import model_state


def tickets(engine: Any) -> Tensor:
    """Scratch of retrieval that is zero between its ops, flat."""
    return torch.cat([x.flatten() for x in model_state(engine).retrieval.scratch.zeroed])


def one_launch_ran(engine: Any) -> bool:
    """Whether layers have retrieved in one launch since this was asked the last time.

    Such a launch lists entries that may be its last one, and leaves the list as it is.
    """
    from vllm_kvx.ops.retrieval.cuda import FUSED_LIST

    one = model_state(engine).retrieval.scratch.one_launch
    if one is None:
        return False
    listed = one.state[:, FUSED_LIST:]
    ran = bool(listed.any())
    listed.zero_()
    return ran


def room_for_scores(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    """The scores of so many entries have room in CUDA graphs."""
    from vllm_kvx.worker.decode import retrieval

    monkeypatch.setattr(retrieval, "capacity_of", lambda *_, **__: entries)


def watch_graphs(engine: Any) -> list[tuple[bool, int, int]]:
    """Grows by each step's: needs Python, entries of the segment that scores most, batches."""
    from vllm_kvx.ops.retrieval.rows import room_of

    state = model_state(engine)
    needs_python, eager_pass = state.needs_python, state.retrieval.eager_pass
    seen: list[tuple[bool, int, int]] = []
    decided: list[bool] = []

    def decides(*args: Any) -> bool:
        decided.append(needs_python(*args))
        return decided[-1]

    def runs(step: Any, *args: Any) -> Any:
        now = eager_pass(step, *args)
        most = max(len(batches) for batches in now.batches) if now is not None else 0
        seen.append((decided[-1], int(room_of(step.lens, 1).sum(axis=1).max()), most))
        return now

    state.needs_python, state.retrieval.eager_pass = decides, runs
    return seen


def count_graph_replays(engine: Any) -> dict[str, int]:
    """Counts FULL replays (`full`) against all forward passes of real batches (`steps`)."""
    return _count_graphs(engine, {"full": 0, "steps": 0}, lambda: "full")


def count_retrieval_graphs(engine: Any) -> dict[str, int]:
    """Counts decode steps by what their FULL graph does, and all real steps (`steps`)."""
    retrieval = model_state(engine).retrieval
    return _count_graphs(
        engine, {"steps": 0}, lambda: "+".join(mode.value for mode in retrieval.graph)
    )


def count_waiting_graphs(engine: Any) -> dict[str, int]:
    """Counts FULL replays that keep queries (`keeps`), others (`full`), and all real steps."""
    waiting = model_state(engine).waiting
    counts = {"keeps": 0, "full": 0, "steps": 0}
    return _count_graphs(engine, counts, lambda: "keeps" if waiting.keeps else "full")


@contextmanager
def waiting_without_graphs(engine: Any) -> Iterator[None]:
    """Inside, steps in which requests wait for generated tokens run without FULL graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_state(engine).waiting, "in_graphs", False)
        yield


def room_in_graphs(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A graph may have so many rows that retrieve; vLLM describes none on CPU."""
    from vllm_kvx.worker.decode import graph_rows

    monkeypatch.setattr(graph_rows, "most_rows", lambda config: rows)


def capture_sets_of(engine: Any, manager: Any) -> None:
    """`manager` captures and replays a set of graphs for each kind of step of the server."""
    from vllm_kvx.worker.graph_sets import _capture_each, _Kinds

    state = model_state(engine)
    _capture_each(manager, _Kinds(state.retrieval, state.waiting))


def replay_waiting_steps(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Two of three steps that may replay a graph which keeps queries do what it has in it.

    Counts those that do (`True`), and the others that may.
    """
    from vllm.config.compilation import CUDAGraphMode

    from vllm_kvx.worker.model_state import PolicyModelState

    stock, counts = PolicyModelState.prepare_attn, Counter[bool]()

    def prepare_attn(self: Any, batch: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        if self._step is not None and self._step.chunks and batch.num_tokens == batch.num_reqs:
            tokens = batch.num_computed_tokens_np, batch.num_scheduled_tokens
            if not self.needs_python(batch.idx_mapping_np, *tokens):
                replays = counts.total() % 3 > 0
                counts[replays] += 1
                mode = CUDAGraphMode.FULL if replays else mode
        return stock(self, batch, mode, *args, **kwargs)

    monkeypatch.setattr(PolicyModelState, "prepare_attn", prepare_attn)
    return counts


@contextmanager
def replaying_drafts(
    engine: Any, sizes: Sequence[int], plans: bool = False
) -> Iterator[Counter[int]]:
    """Inside, passes that draft replay "graphs" of these numbers of rows; see ``replays``.

    Yields how often, by number of rows, as they grow.

    plans: attention is planned within them, as some backends of GPUs do.
    """
    from support.replays import replay_in_python
    from vllm_kvx.worker import row_graphs

    runner = engine.runner
    with pytest.MonkeyPatch.context() as patch:
        counts = replay_in_python(patch)
        patch.setattr(row_graphs, "sizes_of", lambda *_: list(sizes))
        if plans:
            _plan_in_graphs(patch)
        (graphs,) = row_graphs.graphs_of(runner, model_state(engine).settings)
        with torch.inference_mode():
            graphs.capture()
        patch.setattr(runner.cudagraph_manager, "kvx_row_graphs", [graphs], raising=False)
        yield counts


def _plan_in_graphs(patch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU attention plans a batch again by lengths that changed in place."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    from support.replays import plan_again

    patch.setattr(Builder, "supports_draft_decode_metadata_update", True)
    patch.setattr(Builder, "update_draft_decode_metadata", plan_again)


@contextmanager
def drafting_without_graphs(engine: Any) -> Iterator[None]:
    """Inside, passes that draft run without graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner.cudagraph_manager, "kvx_row_graphs", [])
        yield


def count_draft_replays(engine: Any) -> Counter[int]:
    """Counts passes that draft by replaying a graph, by its number of rows; 0: steps without."""
    from vllm_kvx.worker import row_passes

    counts: Counter[int] = Counter()
    for graphs in row_passes.row_graphs_of(engine.runner):
        name = "draft" if isinstance(graphs, row_passes.DraftGraphs) else "run"
        run, replay = getattr(graphs, name), graphs.manager.run_fullgraph

        def counted(desc: Any, replay: Any = replay) -> Any:
            counts[desc.num_tokens] += 1
            return replay(desc)

        def ran(ids: Any, now: Any, run: Any = run) -> Any:
            found = run(ids, now)
            counts[0] += found is None
            return found

        setattr(graphs, name, ran)
        graphs.manager.run_fullgraph = counted
    return counts


def _count_graphs(
    engine: Any, counts: dict[str, int], name_of: Callable[[], str]
) -> dict[str, int]:
    manager, state = engine.runner.cudagraph_manager, model_state(engine)
    run, preprocess = manager.run_fullgraph, state.preprocess_state

    def run_fullgraph(desc: Any) -> Any:
        name = name_of()
        counts[name] = counts.get(name, 0) + 1
        return run(desc)

    def preprocess_state(*args: Any) -> None:
        counts["steps"] += 1
        preprocess(*args)

    manager.run_fullgraph, state.preprocess_state = run_fullgraph, preprocess_state
    return counts


def draft_from(engine: Any, tokens: int) -> None:
    """The model drafts for itself in steps whose requests have at least so many tokens."""
    from vllm_kvx.worker.self_drafter import _token_bytes

    engine.runner.speculator.least_bytes = tokens * _token_bytes(model_state(engine).hooks)
