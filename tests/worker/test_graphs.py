"""Sets of CUDA graphs, on a manager that only notes what it captures."""

from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_kvx.config.settings import KVSettings
from vllm_kvx.worker.decode.graphs import capture_each_mode
from vllm_kvx.worker.decode.step import graph_modes

MODES = ("dense", "all", "mixed")


class Manager:
    """What ``capture_each_mode`` touches of vLLM's ``CudaGraphManager``."""

    def __init__(self, retrieval: Any) -> None:
        self.retrieval = retrieval
        self.graphs: dict[str, tuple[str, str]] = {}
        self._capture_descs = {
            CUDAGraphMode.PIECEWISE: ["p"],
            CUDAGraphMode.FULL: ["8", "4", "2", "1"],
        }
        self._max_full_descs_to_capture: int | None = None
        self.captured: list[str] = []

    def capture(self, progress_bar_desc: str = "") -> None:
        for descriptions in self._capture_descs.values():
            for description in descriptions[: self._max_full_descs_to_capture]:
                self.captured.append(f"{description} {self.retrieval.graph}")
                self.graphs[description] = (description, self.retrieval.graph)

    def run_fullgraph(self, description: str) -> tuple[str, str]:
        return self.graphs[description]


class Retrieval:
    graph_modes = MODES
    replays = True
    graph = "dense"


class Runner:
    def __init__(self, retrieval: Any) -> None:
        self.retrieval, self.cudagraph_manager = retrieval, None

    def initialize_kv_cache(self) -> None:
        self.cudagraph_manager: Any = Manager(self.retrieval)


@pytest.fixture
def runner() -> Runner:
    retrieval: Any = Retrieval()
    runner = Runner(retrieval)
    capture_each_mode(runner, retrieval)
    runner.initialize_kv_cache()
    return runner


def test_every_set_is_captured_and_replayed(runner: Runner) -> None:
    manager = runner.cudagraph_manager
    manager.capture()
    full = [f"{size} {mode}" for mode in MODES for size in (8, 4, 2, 1)]
    assert manager.captured == ["p dense", *full]
    for mode in MODES:
        runner.retrieval.graph = mode
        assert manager.run_fullgraph("4") == ("4", mode)


def test_memory_is_reserved_for_every_set(runner: Runner) -> None:
    """As vLLM's ``profile_cudagraph_memory`` does: two graphs are measured, all are counted."""
    manager = runner.cudagraph_manager
    manager._max_full_descs_to_capture = 2
    manager.capture()
    assert manager.captured == ["p dense", "8 dense", "4 dense"]
    count = len(manager._capture_descs[CUDAGraphMode.FULL])
    assert count == 3 * 4
    estimate = cudagraph_utils._extrapolate_full_graph_memory([100 << 20, 5 << 20], count)
    assert estimate == (100 + 11 * 5) << 20
    # The real KV cache comes with a manager of its own.
    runner.initialize_kv_cache()
    runner.cudagraph_manager.capture()
    assert len(runner.cudagraph_manager.captured) == 1 + 3 * 4


def test_where_tokens_are_drafted_only_dense_steps_have_graphs() -> None:
    """Of them a request has several rows, which a graph that retrieves does not know."""
    retrieval: Any = Retrieval()
    retrieval.replays = False
    runner = Runner(retrieval)
    capture_each_mode(runner, retrieval)
    runner.initialize_kv_cache()
    runner.cudagraph_manager.capture()
    assert runner.cudagraph_manager.captured == ["p dense", *(f"{n} dense" for n in (8, 4, 2, 1))]
    assert runner.cudagraph_manager.run_fullgraph("4") == ("4", "dense")


def modes_of(*names: str, requests: str = "layout", starts: tuple[int, ...]) -> list[str]:
    """The sets of a server started for `names`, a letter a stage."""
    config = {"kv_policy": names[0], "kv_layout": list(names[1:]), "kv_request_policies": requests}
    settings = KVSettings.of(config, num_layers=32)
    assert settings is not None and settings.layout.stage_starts == starts
    return [
        "".join(m.name[0] for m in modes) for modes in graph_modes(settings.may_retrieve(), starts)
    ]


def test_each_policy_of_the_server_has_its_set() -> None:
    """`speed-24+fier-2048` retrieves in the lower layers, whichever policy is the server's own."""
    assert modes_of("fier-2048", "snapkv:kv_floor=0", starts=(0,)) == ["D", "A", "M"]
    both = modes_of("fier-2048", "speed-24+fier-2048", starts=(0, 24))
    assert both == ["DD", "AA", "AD", "MM"]
    others = "speed-24+fier-2048", "snapkv:kv_floor=0+fier-512", "fier-512"
    assert sorted(both) == sorted(modes_of(*others, starts=(0, 24)))


def test_what_requests_may_compose_has_its_set() -> None:
    """They may name `speed-24+fier-2048` on a server with room for both, if the operator does not
    say which policies they may name."""
    parts = "fier-2048", "speed-24"
    assert modes_of(*parts, starts=(0, 24)) == ["DD", "AA", "AD", "MM"]
    assert modes_of(*parts, requests="list", starts=(0, 24)) == ["DD", "AA", "MM"]
    assert modes_of("speed-24", "fier-2048", requests="off", starts=(0, 24)) == ["DD", "AA", "MM"]
    # `selfonly-24+fier-2048` is refused.
    assert modes_of("fier-2048", "selfonly-24", starts=(0, 24)) == ["DD", "AA", "MM"]
