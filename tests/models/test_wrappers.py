"""What a model around a decoder may do to a text, if ranges of layers are to run past it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm_kvx.models.layer_ranges import LayerRanges, NoRanges
from vllm_kvx.models.position_rows import PositionRows
from vllm_kvx.models.wrappers import check_wrapper

HIDDEN, ROWS = 16, 3


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, HIDDEN)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        raise AssertionError("the decoder itself is not run")


class Wrapper(nn.Module):
    """Calls its decoder as `how` says."""

    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.model = Decoder()
        self.how = how

    def forward(self, ids: Any, positions: Any, tensors: Any, embeds: Any) -> Any:
        return self.how(self.language_model.model, ids, positions, tensors, embeds)


def check(how: Callable[..., Any], rows: PositionRows | None = None) -> None:
    model = Wrapper(how)
    decoder = model.language_model.model
    ranges = LayerRanges.__new__(LayerRanges)
    ranges.decoder, ranges.hidden_size, ranges.position_rows = decoder, HIDDEN, rows
    check_wrapper(model, model.forward, ranges)
    assert model.language_model.model is decoder


def twice(decoder: Any, ids: Any, at: Any, *_: Any) -> Any:
    decoder(ids, at)
    return decoder(ids, at)


@pytest.mark.parametrize("rows", [None, PositionRows(ROWS, 100)])
def test_what_hands_a_text_on(rows: PositionRows | None) -> None:
    check(lambda decoder, ids, at, *rest: decoder(ids, at, *rest), rows)
    check(lambda decoder, ids, at, *_: decoder(input_ids=ids, positions=at, added=None), rows)


@pytest.mark.parametrize(
    "how",
    [
        lambda decoder, ids, at, *_: decoder(ids, at) * 2,
        lambda decoder, ids, at, *_: decoder(ids, at + 1),
        lambda decoder, ids, at, *_: decoder(ids, at, added=at),
        lambda decoder, ids, at, *_: decoder(None, at, inputs_embeds=ids),
        lambda decoder, ids, at, *_: ids,
        twice,
    ],
)
def test_what_does_more_is_refused(how: Callable[..., Any]) -> None:
    with pytest.raises(NoRanges, match="Wrapper does more to a text than its decoder does"):
        check(how)


def test_what_needs_more_of_its_decoder_is_refused() -> None:
    with pytest.raises(NoRanges, match=r"does not run without its decoder.*embed"):
        check(lambda decoder, ids, at, *_: decoder(None, at, inputs_embeds=decoder.embed(ids)))


def test_rows_of_positions_lie_as_vllm_has_them() -> None:
    stock = torch.zeros(ROWS, 101, dtype=torch.int64)[:, :7]
    made = PositionRows(ROWS, 101).of(torch.arange(7))
    assert (made.shape, made.stride(), made.dtype) == (stock.shape, stock.stride(), stock.dtype)
    assert torch.equal(made, torch.arange(7).expand(ROWS, 7))
