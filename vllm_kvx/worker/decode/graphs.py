"""CUDA graphs of a server that retrieves: one set for each kind of decode step."""

from collections.abc import Callable
from typing import Any

from vllm.config.compilation import CUDAGraphMode

from vllm_kvx.worker.decode.retrieval import Retrieval
from vllm_kvx.worker.decode.step import Modes


def capture_each_mode(runner: Any, retrieval: Retrieval) -> None:
    """Makes vLLM capture every FULL graph once for each of ``Retrieval.graph_modes``.

    ``Retrieval.graph`` says which of them a step replays. A step in which nobody retrieves then
    runs what stock vLLM runs, without a kernel of ours. Where tokens are drafted, steps that
    retrieve replay none (``Retrieval.replays``).
    """
    stock: Callable[..., Any] = runner.initialize_kv_cache

    def initialize_kv_cache(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        if runner.cudagraph_manager is not None:
            _capture_sets(runner.cudagraph_manager, retrieval)
        return result

    runner.initialize_kv_cache = initialize_kv_cache


def _capture_sets(manager: Any, retrieval: Retrieval) -> None:
    stock_capture, stock_run = manager.capture, manager.run_fullgraph
    graph_modes = retrieval.graph_modes if retrieval.replays else retrieval.graph_modes[:1]
    sets: dict[Modes, dict[Any, Any]] = {modes: {} for modes in graph_modes}
    dense = retrieval.graph_modes[0]
    sets[dense] = manager.graphs

    def capture(*args: Any, **kwargs: Any) -> None:
        retrieval.graph = dense
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
            for modes in graph_modes[1:]:
                retrieval.graph, manager.graphs = modes, sets[modes]
                what = "Capturing CUDA graphs of retrieval"
                stock_capture(*args, **{**kwargs, "progress_bar_desc": what})
        finally:
            manager._capture_descs = descriptions
            retrieval.graph, manager.graphs = dense, sets[dense]

    def run_fullgraph(description: Any) -> Any:
        manager.graphs = sets[retrieval.graph]
        try:
            return stock_run(description)
        finally:
            manager.graphs = sets[dense]

    manager.capture, manager.run_fullgraph = capture, run_fullgraph
