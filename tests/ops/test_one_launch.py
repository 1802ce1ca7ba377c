"""Where FIER's layer is done in one launch. It runs on GPUs only: see tests/gpu."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval import cuda, one_launch
from vllm_kvx.ops.retrieval.one_launch import (
    MAX_ROWS,
    MAX_SPLITS,
    VARIABLE,
    OneLaunch,
    longest_of,
    rows_in_graphs,
)
from vllm_kvx.ops.retrieval.retrieve import Scratch

CPU = torch.device("cpu")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a GPU has the answers of an H200; rows share some room evenly."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    h200 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    monkeypatch.setattr(cuda, "why_not", lambda: "")
    monkeypatch.setattr(cuda, "fused_longest", lambda *args: 480_000 // args[4])


def takes(one: OneLaunch, rows: int, length: int, dtype: torch.dtype, cap: float | None) -> bool:
    cache = torch.zeros(2, 8, 32, 128, dtype=dtype)
    table = torch.zeros(rows, length // 32, dtype=torch.int32)
    query = torch.zeros(rows, 32, 64, dtype=torch.bfloat16)
    return one.takes(query, PagedKV.of(cache, 64), table, rows, cap)


@pytest.mark.usefixtures("hopper")
class TestWhereItMay:
    def test_by_what_a_graph_fixes(self) -> None:
        one = OneLaunch.of(32, 8, 64, 256, CPU)
        assert one is not None and one.longest == (480_000, 240_000, 160_000, 120_000)
        assert one.state.shape == (MAX_ROWS * 8, cuda.FUSED_STATE) and one.splits == 16
        assert one.counters.shape[1] == cuda.FUSED_LIST and not one.state.any()
        bf16 = torch.bfloat16
        assert takes(one, 1, 480_000, bf16, None) and not takes(one, 1, 480_032, bf16, None)
        assert takes(one, 4, 120_000, bf16, None) and not takes(one, 4, 131_072, bf16, None)
        assert not takes(one, MAX_ROWS + 1, 32, bf16, None) and not takes(one, 0, 32, bf16, None)
        assert not takes(one, 1, 32, torch.float8_e4m3fn, None)
        assert not takes(one, 1, 32, bf16, 30.0)

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "max_rows", "rows"),
        [(32, 8, 1, 1), (16, 4, 64, 4), (32, 16, 64, 2), (32, 32, 64, 1), (8, 1, 64, 4)],
    )
    def test_rows(self, heads: int, kv_heads: int, max_rows: int, rows: int) -> None:
        one = OneLaunch.of(heads, kv_heads, 128, max_rows, CPU)
        assert one is not None and len(one.longest) == rows
        assert one.splits == min(132 // kv_heads, MAX_SPLITS)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(40, 40), (16, 1), (72, 8)])
    def test_heads_that_are_too_many(self, heads: int, kv_heads: int) -> None:
        assert OneLaunch.of(heads, kv_heads, 128, 64, CPU) is None

    def test_other_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for capability in ((8, 0), (10, 0), (12, 0)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
            assert OneLaunch.of(32, 8, 128, 64, CPU) is None
            assert longest_of(32, 8, 128, 64, CPU) == (0, 0, ())

    def test_operators_that_do_not_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert longest_of(32, 8, 128, 64, CPU)[2]
        monkeypatch.setattr(cuda, "why_not", lambda: "they were deleted meanwhile")
        assert longest_of(32, 8, 128, 64, CPU) == (0, 0, ())


def layer(
    heads: int = 32, kv_heads: int = 8, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16
) -> SimpleNamespace:
    impl = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, head_size=head_dim)
    return SimpleNamespace(impl=impl, kv_cache_torch_dtype=dtype)


def pays(layer: SimpleNamespace) -> bool:
    return one_launch.pays(layer, torch.bfloat16)


def test_servers_with_a_soft_cap_take_three() -> None:
    """Gemma 2 27B on two ranks has the heads that were measured."""
    capped = layer()
    for cap, takes_one in ((50.0, False), (0, True), (None, True)):
        capped.impl.logits_soft_cap = cap
        assert pays(capped) == takes_one


def test_servers_take_it_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # Llama 3.1 8B and 70B on four, Qwen 2.5 7B and 14B, Qwen 3 32B, gpt-oss.
    shapes = [(32, 8), (16, 2), (28, 4), (40, 8), (64, 8)]
    assert all(pays(layer(*shape)) for shape in shapes) and pays(layer(64, 8, head_dim=64))
    others = [layer(head_dim=256), layer(64, 16), layer(8, 1), layer(96, 8), layer(head_dim=96)]
    assert not any(map(pays, others))
    # int8 with scales, fp8, and 16 bits of another kind.
    assert not any(pays(layer(dtype=d)) for d in (torch.int8, torch.uint8, torch.float16))
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    assert not pays(layer())
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
    assert pays(layer())


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv(VARIABLE, value)
        assert pays(layer()) == wanted
    monkeypatch.setenv(VARIABLE, "no")
    with pytest.raises(ValueError, match="set it to 0"):
        pays(layer())


def test_rows_of_the_largest_graph_that_it_does() -> None:
    """A step of three requests replays the graph for four, which it may not do."""
    longest = (400, 300, 200, 100)
    lengths, captured = (401, 400, 301, 300, 200, 101, 100), (8, 4, 2, 1)
    found = {most: rows_in_graphs(longest, most, captured) for most in lengths}
    assert found == {401: 0, 400: 1, 301: 1, 300: 2, 200: 2, 101: 2, 100: 4}
    assert rows_in_graphs((), 1, captured) == 0


@pytest.mark.parametrize(
    ("captured", "rows"),
    [
        ((), 3),
        ((8,), 0),
        ((4, 8), 0),
        ((2, 8), 2),
        ((3, 6), 3),
        ((1,), 3),
        ((1, 2), 3),
        ((1, 4), 1),
    ],
)
def test_rows_by_the_graphs_that_a_server_has(captured: tuple[int, ...], rows: int) -> None:
    """One launch does three rows here: a single request may replay a graph for eight."""
    assert rows_in_graphs((400, 300, 200, 100), 150, captured) == rows


def test_what_chooses_has_the_same_memory() -> None:
    scratch = Scratch.of(INDEXES["one_bit"], 4, 2, 64, 2, 64, 8, 1, "max", CPU)
    assert scratch.one_launch is None and scratch.that_chooses is scratch
    assert len(scratch.zeroed) == 2
    state = torch.zeros(4, cuda.FUSED_STATE, dtype=torch.int32)
    served = replace(scratch, one_launch=OneLaunch(state, 132, 66, (64,)))
    assert [each.rows_in_one(64, (1, 2)) for each in (scratch, served)] == [0, 1]
    assert served.rows_in_one(65, (1, 2)) == served.rows_in_one(64, (2,)) == 0
    chooses = served.that_chooses
    assert chooses.one_launch is None and chooses.indices is served.indices
    assert served.zeroed[2].data_ptr() == state.data_ptr()


def test_other_indexes() -> None:
    assert [name for name, index in INDEXES.items() if index.in_one_launch] == ["one_bit"]
