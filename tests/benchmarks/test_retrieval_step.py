"""The benchmark of a step's layers: what it times beside what is served. It needs a GPU to run."""

import argparse
from dataclasses import replace

import pytest
import torch

from benchmarks.ops.rest_of_layer import RestOfLayer
from benchmarks.ops.retrieval_layer import Heads, Layer
from benchmarks.ops.retrieval_step import Case, launches_of, variants_of
from vllm_kvx.ops.retrieval import cuda
from vllm_kvx.ops.retrieval.one_launch import OneLaunch


def test_cases() -> None:
    assert Case.of("6of8x130000") == Case("6of8x130000", 6, 8, 130_000)
    assert Case.of("2x64").rows == 2
    for wrong in ("8of6x64", "64", "0x64"):
        with pytest.raises(argparse.ArgumentTypeError, match=wrong):
            Case.of(wrong)


def test_both_ways() -> None:
    step = Layer(Heads(4, 2, 64), 256, 2).decode(256, 2, 64)
    scratch = step.scratch("torch")
    variants = variants_of(scratch, 2)
    assert launches_of(scratch, step) == 3 and "three launches" not in variants
    state = torch.zeros(4, cuda.FUSED_STATE, dtype=torch.int32)
    for longest, launches in ((256, 1), (255, 3)):
        one = OneLaunch(state, 132, 66, (512, longest))
        served = replace(scratch, one_launch=one)
        variants = variants_of(served, 2)
        assert launches_of(served, step) == launches
        assert [name for name, each in variants.items() if each.one_launch] == ["as served"]
        assert variants["three launches"].one_launch is None


def test_the_rest_of_a_layer() -> None:
    """It writes each request's last entry, and attention runs between its halves."""
    shape = Heads(4, 2, 64)
    step = Layer(shape, 250, 2).decode(250, 2, 64)
    rest = RestOfLayer.of(shape, 128, 96, 2)
    paged, (block, slot) = step.layer.paged, divmod(249, shape.block_size)
    before = paged.keys.clone(), paged.values.clone()
    seen = []
    rest.around(step, lambda: seen.append(paged.keys.clone()))()
    for now, then in zip((paged.keys, paged.values), before, strict=True):
        changed = (now != then).any(-1).any(1).nonzero().tolist()
        assert sorted(changed) == sorted([int(x), slot] for x in step.table[:, block])
    assert torch.equal(seen[0], paged.keys)
