"""Sets of CUDA graphs, on a manager that only notes what it captures."""

from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_kvx.config.settings import KVSettings
from vllm_kvx.worker.decode.step import graph_modes
from vllm_kvx.worker.graph_sets import capture_sets

MODES = ("dense", "all", "mixed")


class Manager:
    """What ``capture_sets`` touches of vLLM's ``CudaGraphManager``."""

    def __init__(self, retrieval: Any, waiting: Any) -> None:
        self.retrieval, self.waiting = retrieval, waiting
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
                self.captured.append(f"{description} {self._kind}")
                self.graphs[description] = (description, self._kind)

    @property
    def _kind(self) -> str:
        modes = "stock" if self.retrieval is None else self.retrieval.graph
        return f"{modes} keeping" if self.waiting.keeps else modes

    def run_fullgraph(self, description: str) -> tuple[str, str]:
        return self.graphs[description]


class Retrieval:
    graph = "dense"

    def __init__(self, graph_modes: tuple[str, ...] = MODES) -> None:
        self.graph_modes = graph_modes


class Waiting:
    """What it asks of ``WaitingQueries``."""

    keeps = False

    def __init__(self, in_graphs: bool) -> None:
        self.in_graphs = in_graphs


class Runner:
    def __init__(self, retrieval: Any, in_graphs: bool = False) -> None:
        self.cudagraph_manager = None
        self.retrieval, self.waiting = retrieval, Waiting(in_graphs)
        waiting: Any = self.waiting
        capture_sets(self, retrieval, waiting)
        self.initialize_kv_cache()

    def initialize_kv_cache(self) -> None:
        self.cudagraph_manager: Any = Manager(self.retrieval, self.waiting)


@pytest.fixture
def runner() -> Runner:
    return Runner(Retrieval())


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


@pytest.mark.parametrize(
    ("modes", "kinds"),
    [
        (None, ["stock", "stock keeping"]),
        (MODES[:1], ["dense", "dense keeping"]),
        (MODES, [*MODES, "mixed keeping"]),
    ],
)
def test_steps_that_keep_queries_have_one_set(
    modes: tuple[str, ...] | None, kinds: list[str]
) -> None:
    """That of the modes which fit any step; others run none of its kernels."""
    runner = Runner(None if modes is None else Retrieval(modes), in_graphs=True)
    manager = runner.cudagraph_manager
    manager._max_full_descs_to_capture = 2
    manager.capture()
    assert len(manager._capture_descs[CUDAGraphMode.FULL]) == 4 * len(kinds)
    runner.initialize_kv_cache()
    manager = runner.cudagraph_manager
    manager.capture()
    assert manager.captured == [
        f"p {kinds[0]}",
        *(f"{size} {kind}" for kind in kinds for size in (8, 4, 2, 1)),
    ]
    assert not runner.waiting.keeps
    for kind in kinds:
        runner.waiting.keeps = kind.endswith(" keeping")
        if modes is not None:
            runner.retrieval.graph = kind.removesuffix(" keeping")
        assert manager.run_fullgraph("4") == ("4", kind)
        assert not runner.waiting.keeps


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


def test_steps_that_only_drafts_may_retrieve_in_have_none() -> None:
    """Requests may name the drafter's policy; few will, and all servers would capture for them."""
    config = {"kv_policy": "full", "kv_drafts": {"policy": "fier-256", "cache_to_weights": 1.0}}
    for named, sets in (("full", ["D"]), ("fier-2048", ["D", "A", "M"])):
        settings = KVSettings.of(config | {"kv_policy": named}, num_layers=32)
        assert settings is not None and settings.layout.sidecar is not None
        modes = graph_modes(settings.may_retrieve(), (0,))
        assert ["".join(m.name[0] for m in each) for each in modes] == sets
