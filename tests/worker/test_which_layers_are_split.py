"""Which layers are split, and what attention is told of the rows that run one."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_kvx.policy.layout import layout_of
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.windows import Windows
from vllm_kvx.worker.batch import PassBatch, unplanned
from vllm_kvx.worker.prefill.split_layer import SplitLayer
from vllm_kvx.worker.rows import DeviceRows, plan_rows
from vllm_kvx.worker.split_layers import Cuts, cuts_of

CPU = torch.device("cpu")


def cuts(
    *names: str,
    backend: str = "FLASH_ATTN",
    updates: bool = False,
    fused: bool = False,
    disabled: Sequence[str] | None = None,
    windows: Windows | None = None,
) -> Cuts:
    """Of a server with 8 layers.

    updates: whether its attention stores entries itself. fused: and quantizes its output.
    disabled: what ``kv_disable`` names.
    """
    layout = replace(layout_of(map(parse_policy, names), 8), windows=windows)
    its = SimpleNamespace(get_name=lambda: backend, forward_includes_kv_cache_update=updates)
    attention: Any = [SimpleNamespace(attn_backend=its)] * 8
    compiled = SimpleNamespace(pass_config=SimpleNamespace(fuse_attn_quant=fused))
    keys = {} if disabled is None else {"kv_disable": disabled}
    config: Any = SimpleNamespace(compilation_config=compiled, additional_config=keys)
    return cuts_of(layout, attention, config)


@pytest.mark.parametrize(
    ("names", "firsts", "splits"),
    [
        (["speed-5"], (0, 4), {4}),
        (["fastkv:kv_floor=0,tsp_layer=3", "speed-4", "speed-6"], (0, 3, 5), {3, 5}),
        (["speed-1"], (0, 1), set()),
        (["speed-1", "speed-2"], (0, 1), {1}),
        (["speed-1", "gemfilter:layer=2,kv_floor=0"], (0, 1, 2), {2}),
        (["snapkv:kv_floor=0"], (0,), set()),
        (["structkv:pivot=online,kv_floor=0"], (0,), set()),
        (["swiftkv-5"], (0, 5), set()),
        (["speed-5", "swiftkv-3"], (0, 3, 5), set()),
    ],
)
def test_the_layer_below_a_cut(names: list[str], firsts: tuple[int, ...], splits: set[int]) -> None:
    assert cuts(*names) == Cuts(firsts, frozenset(splits))


def test_not_one_that_slides() -> None:
    windows = Windows((0, 1, 2, 4, 5, 6), 64)
    names = "fastkv:kv_floor=0,tsp_layer=3", "speed-3", "speed-6"
    assert cuts(*names, windows=windows) == Cuts((0, 3, 6), frozenset({3}))


@pytest.mark.parametrize(
    ("disabled", "is_split"),
    [
        (None, True),
        ([], True),
        (["compiled_ranges"], True),
        (["split_layers"], False),
        (["compiled_ranges", "split_layers"], False),
    ],
)
def test_disabled(disabled: list[str] | None, is_split: bool) -> None:
    assert cuts("speed-5", disabled=disabled) == (
        Cuts((0, 4), frozenset({4})) if is_split else Cuts((0, 5), frozenset())
    )


@pytest.mark.parametrize("options", [{"backend": "FLASHINFER"}, {"updates": True}, {"fused": True}])
def test_attention_that_cannot(options: dict[str, Any]) -> None:
    assert cuts("speed-5", **options) == Cuts((0, 5), frozenset())


def test_batches_that_are_too_long_to_plan() -> None:
    builders: Any = [
        SimpleNamespace(aot_schedule=True),
        SimpleNamespace(aot_schedule=False),
        object(),
    ]
    groups: Any = [[SimpleNamespace(metadata_builders=builders)], []]
    with pytest.raises(RuntimeError), unplanned(groups):
        assert not builders[0].aot_schedule
        raise RuntimeError
    assert builders[0].aot_schedule and not builders[1].aot_schedule


def test_both_ends_of_a_prompt_are_two_sequences() -> None:
    """A first chunk with anchors and tail, a decode token, one that retrieves, a last chunk."""
    begins, counts = np.array([0, 60, 40, 30]), np.array([20, 1, 1, 9])
    gap = np.array([2, 2, 0, 2]), np.array([15, 15, 0, 35])
    projects = np.array([True, True, False, True])
    (plan,) = plan_rows(begins, counts, gap[0][None], gap[1][None], projects[None])
    assert plan is not None and plan.counts.tolist() == [5, 1, 1, 2]
    tables = torch.arange(8).view(4, 2)
    cut = PassBatch(
        np.arange(4), plan.counts, torch.arange(9), (tables,), torch.arange(9)[None] + 100
    )
    none: Any = None
    rows = DeviceRows(none, none, None, cut, plan)
    told: list[Any] = []

    def metadata_of(
        batch: PassBatch, ends: np.ndarray, groups: Any, is_prefill: bool, is_known: np.ndarray
    ) -> Any:
        told.append((batch, ends.tolist(), groups, is_prefill, is_known.tolist()))
        return {"layer 4": "its own"}

    step: Any = SimpleNamespace(
        begins=begins,
        stored_lens=(begins + counts)[None],
        retrieval=SimpleNamespace(whole=np.array([[0, 0, 1, 0]])),
        metadata={"layer 4": "the stage's", "layer 5": "the same"},
        metadata_of=metadata_of,
    )
    its = SimpleNamespace(layer_name="layer 4")
    hook = SimpleNamespace(index=4, stage=0, group=0, layer=its, retrieves=True)
    memory: Any = SimpleNamespace(device=CPU)
    layer = SplitLayer(SimpleNamespace(by_number={4: hook}), memory, step, 4)  # type: ignore[arg-type]
    metadata = layer.metadata_later(rows)()
    assert metadata == {"layer 4": "its own", "layer 5": "the same"}
    ((batch, ends, groups, is_prefill, is_known),) = told
    assert (groups, is_prefill) == ([0], False)
    # What retrieves is cut to its own rows, whatever was rejected of it.
    assert is_known == [False, False, False, True, False]
    assert batch.requests.tolist() == [0, 0, 1, 2, 3] and batch.counts.tolist() == [2, 3, 1, 1, 2]
    assert ends == [2, 20, 61, 1, 39]
    assert batch.block_tables[0].tolist() == tables[[0, 0, 1, 2, 3]].tolist()
    # The entries of requests that lost rows are there: 0 and 3.
    assert layer.slots(rows).tolist() == [-1] * 5 + [105, 106] + [-1] * 2
