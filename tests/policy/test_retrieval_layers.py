"""Layers that read a part of what they store: which do, which choose it, and one rule a server."""

import pytest

from vllm_kvx.policy.layout import Layout, RetrievalLayout, check_fits, layout_of
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.retrieval_layers import RetrievalLayers
from vllm_kvx.policy.spec import parse_policy


@pytest.mark.parametrize(
    ("dense", "reuse", "first", "choosing"),
    [
        (2, 1, 0, [2, 3, 4, 5, 6, 7]),
        (2, 3, 0, [2, 5]),
        (0, 3, 0, [0, 3, 6]),
        (1, 8, 0, [1]),
        (8, 1, 0, []),
        (9, 3, 0, []),
        # A rank of a pipeline from its first layer on: in the middle of a span, at its beginning,
        # and below all that retrieve.
        (0, 3, 4, [4, 6]),
        (2, 3, 5, [5]),
        (6, 2, 4, [6]),
    ],
)
def test_which_layers_choose(dense: int, reuse: int, first: int, choosing: list[int]) -> None:
    rule = RetrievalLayers(dense, reuse)
    assert [layer for layer in range(first, 8) if rule.chooses(layer, first)] == choosing
    assert [layer for layer in range(8) if rule.retrieves(layer)] == list(range(dense, 8))


@pytest.mark.parametrize(
    ("dense", "starts", "retrieving"),
    [
        (0, (0,), [True]),
        (7, (0,), [True]),
        (8, (0,), [False]),
        (128, (0,), [False]),
        (5, (0, 6), [True, True]),
        (6, (0, 6), [False, True]),
        (8, (0, 6), [False, False]),
    ],
)
def test_stages_that_retrieve(dense: int, starts: tuple[int, ...], retrieving: list[bool]) -> None:
    assert RetrievalLayers(dense).in_stages(starts, 8) == retrieving


def test_a_policy_that_reads_all_layers_whole_says_so() -> None:
    fier = parse_policy("fier-64:dense_layers=8").parts[0]
    assert fier.notice(9) is None
    for layers in (8, 3):
        notice = fier.notice(layers)
        assert notice is not None and "the first 8 layers with full attention whole" in notice
        assert f"there are {layers}: set a lower dense_layers" in notice


def test_a_server_has_one_number_of_layers_that_read_by_a_choice() -> None:
    """Requests differ in budgets; a name that fits is told where they do not."""
    layout = Layout((), RetrievalLayout.of(parse_policy("fier-64:reuse_layers=3").retrieve))  # type: ignore[arg-type]
    assert "a choice for 3 layers" in str(layout.sidecar)
    check_fits(parse_policy("fier-32:reuse_layers=3"), layout, 8)
    with pytest.raises(PolicyError, match="reuse_layers=3"):
        check_fits(parse_policy("fier-32"), layout, 8)
    with pytest.raises(PolicyError, match="reuse_layers"):
        parse_policy("fier-64:reuse_layers=9")


def test_a_server_has_one_number_of_layers_that_read_everything() -> None:
    layout = Layout((), RetrievalLayout.of(parse_policy("fier-64:dense_layers=0").retrieve))  # type: ignore[arg-type]
    assert "the first 0 read whole" in str(layout.sidecar)
    check_fits(parse_policy("fier-32:dense_layers=0"), layout, 8)
    assert str(layout.sidecar and layout.sidecar.largest) == "fier-64:dense_layers=0"
    with pytest.raises(PolicyError, match="dense_layers=0"):
        check_fits(parse_policy("fier-32"), layout, 8)
    with pytest.raises(PolicyError, match="dense_layers"):
        parse_policy("fier-64:dense_layers=-1")
    with pytest.raises(PolicyError, match="reduction, reuse_layers and dense_layers"):
        layout_of([parse_policy("fier-64"), parse_policy("fier-128:dense_layers=3")], 8)
