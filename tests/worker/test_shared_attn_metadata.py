"""Attention metadata that is built once for KV groups of the same spec."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from vllm_kvx.cache.kv_cache_specs import FirstStageAttentionSpec, LaterStageAttentionSpec
from vllm_kvx.worker.shared_attn_metadata import SharedAttnMetadata, only

TABLES = tuple(torch.full((2, 3), group) for group in range(4))
SLOTS = torch.arange(8).view(4, 2)
# What is asked of vLLM, up to the groups.
BATCH: Any = (None, CUDAGraphMode.NONE, TABLES, SLOTS)


@dataclass
class Metadata:
    built_for: str
    block_table: Any = None
    slot_mapping: Any = None


class Builder:
    """As FlashAttention's."""

    supports_update_block_table = True

    def update_block_table(self, metadata: Metadata, table: Any, slots: Any) -> Metadata:
        return Metadata(metadata.built_for, table, slots)


class Other(Builder):
    supports_update_block_table = False


@dataclass
class Backend:
    name: str

    def get_name(self) -> str:
        return self.name


FLASH = Backend("FLASH_ATTN")


def group(name: str, backend: Backend = FLASH, builder: Any = None, block: Any = None) -> Any:
    """An attention group of one layer."""
    chosen = builder or Builder()
    return SimpleNamespace(
        backend=backend,
        layer_names=[name],
        kernel_block_size=block,
        get_metadata_builder=lambda: chosen,
    )


class Built:
    """What vLLM would build, and for which layers it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, batch: Any, mode: Any, tables: Any, slots: Any, attn_groups: Any) -> Any:
        found = {}
        for index, groups in enumerate(attn_groups):
            for each in groups:
                name = each.layer_names[0]
                self.asked.append(name)
                found[name] = Metadata(name, tables[index], slots[index])
        return found


def alike(prepare_attn: Any, *specs: Any) -> SharedAttnMetadata:
    groups: list[Any] = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return SharedAttnMetadata(groups, prepare_attn)


def test_one_for_each_spec() -> None:
    groups, build = [[group(name)] for name in "abcd"], Built()
    found = alike(build, "lower", "lower", "upper", "lower").build(*BATCH, groups)
    assert build.asked == ["a", "c"]
    assert {name: each.built_for for name, each in found.items()} == dict(
        a="a", b="a", c="c", d="a"
    )
    for index, name in enumerate("abcd"):
        assert found[name].block_table is TABLES[index]
        assert torch.equal(found[name].slot_mapping, SLOTS[index])


def test_buckets_of_a_stage_are_alike() -> None:
    """They only split its layers into groups of one size."""
    same = dict(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    lower = [FirstStageAttentionSpec(**same, bucket=bucket) for bucket in (0, 1)]
    upper = [LaterStageAttentionSpec(**same, stage=1, start_layer=5, bucket=b) for b in (0, 1)]
    groups, build = [[group(name)] for name in "abcd"], Built()
    found = alike(build, *lower, *upper).build(*BATCH, groups)
    assert build.asked == ["a", "c"] and sorted(found) == ["a", "b", "c", "d"]


def test_first_of_those_that_are_there() -> None:
    groups, build = only([[group(name)] for name in "abcd"], (1, 3)), Built()
    assert [len(each) for each in groups] == [0, 1, 0, 1]
    found = alike(build, "lower", "lower", "lower", "lower").build(*BATCH, groups)
    assert build.asked == ["b"] and sorted(found) == ["b", "d"]
    assert found["d"].block_table is TABLES[3]


@pytest.mark.parametrize(
    "second",
    [
        [group("b", Backend("TRITON_ATTN"))],
        [group("b", builder=Other())],
        [group("b", block=16)],
        [group("b"), group("also b")],
    ],
    ids=["backend", "builder", "blocks", "two backends"],
)
def test_built_anew(second: list[Any]) -> None:
    build = Built()
    found = alike(build, "lower", "lower").build(*BATCH, [[group("a")], second])
    assert build.asked == ["a", *(each.layer_names[0] for each in second)]
    assert all(name == each.built_for for name, each in found.items())


def test_cpu() -> None:
    """Its builder has no method for it; its metadata is copied all the same."""
    cpu = Backend("CPU_ATTN")
    groups = [[group("a", cpu, Other())], [group("b", cpu, Other())]]
    plan = torch.zeros(5)
    one = CPUAttentionMetadata(
        2, 1, torch.arange(3), 9, torch.ones(2), TABLES[0], SLOTS[0], scheduler_metadata=plan
    )
    found = alike(lambda *_: {"a": one}, "lower", "lower").build(*BATCH, groups)
    assert found["a"] is one and found["b"].scheduler_metadata is plan
    assert found["b"].block_table is TABLES[1] and torch.equal(found["b"].slot_mapping, SLOTS[1])
