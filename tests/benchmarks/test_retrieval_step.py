"""The benchmark of a step's layers: what it times beside what is served. It needs a GPU to run."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.ops import retrieval_step
from benchmarks.ops.layer_shapes import SHAPES, LayerShape
from benchmarks.ops.rest_of_layer import RestOfLayer
from benchmarks.ops.retrieval_layer import Heads, Layer
from benchmarks.ops.retrieval_step import (
    SERVED_ROWS,
    Case,
    case,
    launches_of,
    parse_args,
    variants_of,
)
from vllm_kvx.ops.retrieval import cuda
from vllm_kvx.ops.retrieval.one_launch import OneLaunch


def test_cases() -> None:
    assert Case.of("6of8x130000") == Case("6of8x130000", 6, 8, 130_000)
    assert Case.of("2x64").rows == 2
    for wrong in ("8of6x64", "64", "0x64"):
        with pytest.raises(argparse.ArgumentTypeError, match=wrong):
            Case.of(wrong)


LLAMA, GEMMA = SHAPES["llama-3.1-8b"].heads, SHAPES["gemma3-12b"].heads


def test_both_ways() -> None:
    """One launch and three, and the server's choice of them by its heads."""
    step = Layer(Heads(4, 2, 64), 256, 2).decode(256, 2, 64)
    scratch = step.scratch("torch")
    variants = variants_of(scratch, 2, LLAMA, False)
    assert launches_of(scratch, step) == 3 and "three launches" not in variants
    state = torch.zeros(4, cuda.FUSED_STATE, dtype=torch.int32)
    for longest, launches in ((256, 1), (255, 3)):
        one = replace(scratch, one_launch=OneLaunch(state, 132, 66, (512, longest)))
        assert launches_of(one, step) == launches
        for heads, served, other in (
            (LLAMA, True, "three launches"),
            (GEMMA, False, "one launch"),
        ):
            variants = variants_of(one, 2, heads, launches == 1)
            assert (variants["as served"].one_launch is not None) == served
            both = {"three launches", "one launch"} & variants.keys()
            assert both == ({other} if launches == 1 else set())
            in_one = [name for name, each in variants.items() if each.one_launch]
            assert in_one == ["as served" if served else "one launch"][: served or launches == 1]
            assert (variants.get(other, one).one_launch is None) == (both == {"three launches"})

    # More rows than a server's one launch takes, by `--most-rows`.
    variants = variants_of(one, SERVED_ROWS + 1, LLAMA, True)
    assert variants["as served"].one_launch is None and variants["one launch"] is one
    assert parse_args(["--most-rows", "8"]).most_rows == 8
    for wrong in ("3", "33"):
        with pytest.raises(SystemExit):
            parse_args(["--most-rows", wrong])


def test_a_case_of_two_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock is timed once, the rest of a layer until it takes as long twice, and then taken off."""
    rests = iter([9.0, 9.0, 10.0, 10.0, 10.04, 10.04, 10.5, 10.5])
    attended: list[float] = []

    def measure(run: Callable[[], None], repeats: int) -> float:
        attended.clear()
        run()
        return 64 * (10 + attended[0] if attended else next(rests))

    def reads(scratch: Any, step: Any, chosen: bool = False) -> Callable[[], None]:
        return lambda: attended.append(step.budget / 4)

    heads = Heads(4, 2, 64)
    scratch = Layer(heads, 64, 1).decode(64, 1, 8).scratch("torch")
    monkeypatch.setattr(retrieval_step, "measure", measure)
    monkeypatch.setattr(retrieval_step, "stock_attention", lambda _: lambda: attended.append(8))
    monkeypatch.setattr(retrieval_step, "_retrieve", reads)
    monkeypatch.setattr(retrieval_step, "OTHERS_BYTES", 1 << 20)
    monkeypatch.setattr(retrieval_step.Decode, "scratch", lambda *_: scratch)
    shape = LayerShape(heads, 128, 96)
    found = case(shape, Case.of("1x64"), [8, 16], 1, 1e3, ["as served"], with_rest=True)
    assert next(rests, None) is None
    assert found["layers"] * found["times"] == 64 and found["launches"] == 3
    assert found["rest_us"] == 10.27 and "as served" not in found
    assert (found["stock"]["us"], found["stock"]["ideal_us"]) == (7.73, 65.54)
    assert (found["as served at 8"]["us"], found["as served at 16"]["us"]) == (1.73, 3.73)
    assert found["as served at 16"]["stock_by_this"] == 2.07
    with pytest.raises(SystemExit):
        parse_args(["--shape", "llama-3.1-8b", "qwen3-next", "--with-rest"])
    assert parse_args(["--shape", "llama-3.1-8b", "qwen2.5-7b", "--with-rest"]).budget == [2048]


def test_the_rest_of_a_layer() -> None:
    """It writes each request's last entry, and attention runs between its halves."""
    shape = Heads(4, 2, 64)
    step = Layer(shape, 250, 2).decode(250, 2, 64)
    rest = RestOfLayer.of(LayerShape(shape, 128, 96), 2)
    assert rest.weight_bytes == 4 * (128 * 8 * 64 + 4 * 64 * 128 + 128 * 192 + 96 * 128)
    paged, (block, slot) = step.layer.paged, divmod(249, shape.block_size)
    before = paged.keys.clone(), paged.values.clone()
    seen = []
    rest.around(step, lambda: seen.append(paged.keys.clone()))()
    for now, then in zip((paged.keys, paged.values), before, strict=True):
        changed = (now != then).any(-1).any(1).nonzero().tolist()
        assert sorted(changed) == sorted([int(x), slot] for x in step.table[:, block])
    assert torch.equal(seen[0], paged.keys)
