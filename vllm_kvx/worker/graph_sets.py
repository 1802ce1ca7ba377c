"""Sets of CUDA graphs of decode steps: one for each kind of step that does more than attention."""

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.config.compilation import CUDAGraphMode

from vllm_kvx.worker.decode.retrieval import Retrieval
from vllm_kvx.worker.decode.step import Modes
from vllm_kvx.worker.waiting_queries import WaitingQueries


class GraphKind(NamedTuple):
    """What the graphs of a set do.

    modes: what is retrieved, by stage; () on a server that does not retrieve.
    keeps: whether they keep queries; see ``WaitingQueries``.
    """

    modes: Modes = ()
    keeps: bool = False


class _Kinds:
    """The kinds of a server, the stock one first; `now` is that of the running step.

    Of graphs that keep queries there is one set, of the modes that fit any step.
    """

    def __init__(self, retrieval: Retrieval | None, waiting: WaitingQueries) -> None:
        self._retrieval, self._waiting = retrieval, waiting
        modes = ((),) if retrieval is None else retrieval.graph_modes
        self.all = [GraphKind(each) for each in modes]
        if waiting.in_graphs:
            self.all.append(GraphKind(modes[-1], True))

    @property
    def now(self) -> GraphKind:
        modes = () if self._retrieval is None else self._retrieval.graph
        return GraphKind(modes, self._waiting.keeps)

    @now.setter
    def now(self, kind: GraphKind) -> None:
        self._waiting.keeps = kind.keeps
        if self._retrieval is not None:
            self._retrieval.graph = kind.modes

    def end_step(self) -> None:
        """Once it is queued: what a dummy batch replays next must keep nothing."""
        self._waiting.keeps = False


def capture_sets(runner: Any, retrieval: Retrieval | None, waiting: WaitingQueries) -> None:
    """Makes vLLM capture every FULL graph once for each kind of decode step on this server.

    ``Retrieval.graph`` and ``WaitingQueries.keeps`` say which set a step replays. A step in which
    nobody retrieves or waits then runs what stock vLLM runs, without a kernel of ours.
    """
    kinds = _Kinds(retrieval, waiting)
    if len(kinds.all) == 1:
        return
    stock: Callable[..., Any] = runner.initialize_kv_cache

    def initialize_kv_cache(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        if runner.cudagraph_manager is not None:
            _capture_each(runner.cudagraph_manager, kinds)
        return result

    runner.initialize_kv_cache = initialize_kv_cache


def _capture_each(manager: Any, kinds: _Kinds) -> None:
    stock_capture, stock_run = manager.capture, manager.run_fullgraph
    sets: dict[GraphKind, dict[Any, Any]] = {kind: {} for kind in kinds.all}
    plain = kinds.all[0]
    sets[plain] = manager.graphs

    def capture(*args: Any, **kwargs: Any) -> None:
        kinds.now = plain
        stock_capture(*args, **kwargs)
        descriptions = manager._capture_descs
        full = descriptions.get(CUDAGraphMode.FULL)
        if not full:
            return
        if manager._max_full_descs_to_capture is not None:
            # vLLM will throw this manager away: it measures a few graphs before it sizes the KV
            # cache, and reserves memory for as many as are described here.
            manager._capture_descs = {**descriptions, CUDAGraphMode.FULL: full * len(sets)}
            return
        try:
            manager._capture_descs = {CUDAGraphMode.FULL: full}
            for kind in kinds.all[1:]:
                kinds.now, manager.graphs = kind, sets[kind]
                for_whom = "steps that keep queries" if kind.keeps else "retrieval"
                what = f"Capturing CUDA graphs of {for_whom}"
                stock_capture(*args, **{**kwargs, "progress_bar_desc": what})
        finally:
            manager._capture_descs = descriptions
            kinds.now, manager.graphs = plain, sets[plain]

    def run_fullgraph(description: Any) -> Any:
        manager.graphs = sets[kinds.now]
        try:
            return stock_run(description)
        finally:
            manager.graphs = sets[plain]
            kinds.end_step()

    manager.capture, manager.run_fullgraph = capture, run_fullgraph
