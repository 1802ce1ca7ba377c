"""Triton's interpreter takes the greatest of nothing but NaN, as a GPU does."""

import pytest
import torch
from vllm.triton_utils import tl, triton

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted")


@triton.jit
def _greatest(values, found, width: tl.constexpr):
    rows, columns = tl.arange(0, 2), tl.arange(0, width)
    block = tl.load(values + rows[:, None] * width + columns[None, :])
    value, index = tl.max(block, axis=1, return_indices=True)
    tl.store(found + rows, index)
    tl.store(found + 2 + rows, (value * 10).to(tl.int32))


@pytest.mark.parametrize("lost", ["a row", "none", "one value"])
def test_rows_of_nan_have_some_index(lost: str) -> None:
    values = torch.tensor([[-3.0, -1.0, -2.0, -4.0], [5.0, 6.0, 8.0, 7.0]])
    if lost == "a row":
        values[1] = torch.nan
    elif lost == "one value":
        values[1, 2] = torch.nan
    found = torch.zeros(4, dtype=torch.int32)
    _greatest[(1,)](values, found, 4)
    # The other row is what it is.
    assert (found[0], found[2]) == (1, -10)
    if lost == "a row":
        assert 0 <= found[1] < 4
    else:
        index, value = {"none": (2, 80), "one value": (3, 70)}[lost]
        assert (found[1], found[3]) == (index, value)
