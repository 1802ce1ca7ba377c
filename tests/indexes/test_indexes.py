"""Indexes: a row for every method that retrieves, and what a page keeps for each."""

import pytest

from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.retrieval import cuda
from vllm_kvx.ops.retrieval.index_layout import PageShape
from vllm_kvx.policy.axes import Retrieve
from vllm_kvx.policy.methods.baselines.quest import PAGES
from vllm_kvx.policy.methods.fier import GROUPS
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.retrieval_layers import OF_PAPERS

RETRIEVE = [method for method in METHODS.values() if issubclass(method, Retrieve)]


def test_every_method_has_a_row() -> None:
    assert {method.index_name for method in RETRIEVE} == set(INDEXES)
    assert all(index.name == name for name, index in INDEXES.items())


@pytest.mark.parametrize("method", RETRIEVE, ids=lambda method: method.name)
@pytest.mark.parametrize("group", sorted({*GROUPS, *PAGES} & {32, 64}))
def test_units_are_those_of_the_policy(method: type[Retrieve], group: int) -> None:
    spec = method.of_index(group, 256, "max", "auto", OF_PAPERS).index
    assert spec.group == group
    assert INDEXES[spec.name].unit(group) == spec.unit


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("block_size", "group"), [(32, 32), (64, 32), (128, 64), (128, 128)])
def test_page_bytes(kv_heads: int, head_dim: int, block_size: int, group: int) -> None:
    """Per head: a bit for each channel of each key, two float16 for each channel of each group."""
    shape = PageShape(kv_heads, block_size, head_dim, group)
    bounds = kv_heads * block_size // group * 2 * head_dim * 2
    codes = kv_heads * block_size * head_dim // 8
    assert INDEXES["page_bounds"].page_bytes(shape) == bounds
    assert INDEXES["one_bit"].page_bytes(shape) == bounds + codes


def test_what_cannot_be_indexed() -> None:
    shape = PageShape(2, 32, 80, 16)
    with pytest.raises(ValueError, match="multiple of 32, this model has 80: serve it without"):
        INDEXES["one_bit"].check(shape)
    INDEXES["page_bounds"].check(shape)


def test_reductions_in_cuda() -> None:
    assert all(set(index.cuda_reductions) == set(cuda.REDUCTIONS) for index in INDEXES.values())
