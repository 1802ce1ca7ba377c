"""Ranges of layers, on decoders of a few lines: what is a stream, and what has none."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.sequence import IntermediateTensors

from vllm_kvx.models.layer_ranges import LayerRanges, NoRanges, Residual
from vllm_kvx.models.stream import Projected

HIDDEN, HEADS, DIM, LAYERS = 16, 2, 8, 3


def get_pp_group() -> Any:
    raise AssertionError("vLLM's own group is asked")


class Attention(nn.Module):
    """What is read of vLLM's attention."""

    num_heads = num_kv_heads = HEADS
    head_size = head_size_v = DIM
    query_quant = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query + key + value


class Layer(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.attention = form, Attention()
        self.weight = nn.Parameter(torch.randn(3 * HIDDEN, HIDDEN))

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.form == "sum":
            # In place, as vLLM's kernel.
            stream = hidden if residual is None else residual.add_(hidden)
        elif self.form == "hidden":
            stream = hidden
        else:
            stream = hidden if residual is None else hidden + 2 * residual
        normed = stream / stream.pow(2).mean(-1, keepdim=True).sqrt()
        hidden.copy_(normed) if residual is not None else None
        out = self.attention(*(normed @ self.weight.T).split(HIDDEN, dim=-1))
        return (out, stream) if self.form == "sum" else (stream + out, stream)


class Decoder(nn.Module):
    def __init__(self, form: str = "sum", keys: tuple[str, ...] = ("hidden_states", "residual")):
        super().__init__()
        self.keys, self.start_layer, self.end_layer = keys, 0, LAYERS
        self.embed = nn.Embedding(32, HIDDEN)
        self.layers = nn.ModuleList(Layer(form) for _ in range(LAYERS))

    def make_empty_intermediate_tensors(self, *_: Any) -> IntermediateTensors:
        return IntermediateTensors({key: torch.empty(0) for key in self.keys})

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None,
    ) -> Any:
        residual: Tensor | None = None
        if get_pp_group().is_first_rank:
            hidden = self.embed(input_ids)
        else:
            assert intermediate_tensors is not None
            hidden = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"] if "residual" in self.keys else None
        for layer in list(self.layers)[self.start_layer : self.end_layer]:
            hidden, residual = layer(hidden, residual if "residual" in self.keys else None)
        if not get_pp_group().is_last_rank:
            tensors = {"hidden_states": hidden, "residual": residual}
            return IntermediateTensors({key: tensors[key] for key in self.keys})
        return hidden if self.layers[0].form != "sum" else hidden + residual


def ranges_of(decoder: nn.Module) -> LayerRanges:
    torch.manual_seed(0)
    for parameter in decoder.parameters():
        nn.init.normal_(parameter)
    attention: Any = [layer.attention for layer in decoder.layers]  # type: ignore[union-attr]
    return LayerRanges(nn.ModuleList([decoder]), attention, HIDDEN, torch.float32)


def find(ranges: LayerRanges) -> None:
    ranges.find_residual([1, 2], torch.float32, torch.device("cpu"))


@torch.no_grad()
def run(ranges: LayerRanges, edges: list[int], ids: Tensor) -> Tensor:
    states: Any = (None, None)
    for first, last in pairwise(edges):
        with ranges.as_stage(first, last):
            out = ranges.forward(None if first else ids, ids, *states)
        states = out
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize(
    ("form", "keys", "residual"),
    [
        ("sum", ("hidden_states", "residual"), Residual.SUM),
        ("hidden", ("hidden_states", "residual"), Residual.HIDDEN),
        ("hidden", ("hidden_states",), Residual.HIDDEN),
    ],
)
def test_ranges_and_their_stream(form: str, keys: tuple[str, ...], residual: Residual) -> None:
    ranges, ids = ranges_of(Decoder(form, keys)), torch.arange(5)
    find(ranges)
    assert ranges.residual is residual
    whole = run(ranges, [0, LAYERS], ids)
    assert torch.equal(run(ranges, [0, 1, 2, LAYERS], ids), whole)
    # And vLLM's own group is back.
    assert get_pp_group.__name__ == "get_pp_group"
    assert ranges.decoder.end_layer == LAYERS


def test_projecting_changes_nothing() -> None:
    """vLLM's kernels add and normalise in place, and what projects reads its states again."""
    ranges = ranges_of(Decoder())
    stream = torch.randn(4, HIDDEN)
    before = stream.clone()
    with torch.no_grad():
        some = ranges.projected(1, (stream,), torch.arange(4))
        again = ranges.projected(1, (stream,), torch.arange(4))
    assert torch.equal(stream, before)
    assert torch.equal(some.key, again.key) and some.key.shape == (4, HEADS, DIM)
    ranges.check(1, stream, torch.arange(4), some)
    other = Projected(some.query, some.key, torch.randn_like(some.value))
    with pytest.raises(NoRanges, match="another tensor"):
        ranges.check(1, stream, torch.arange(4), other)


def test_a_bias_hides_no_stream() -> None:
    ranges = ranges_of(Decoder())
    made = ranges.projected

    def far(*args: Any, **kwargs: Any) -> Projected:
        out = made(*args, **kwargs)
        return Projected(out.query, out.key + 1000, out.value)

    ranges.projected = far  # type: ignore[method-assign]
    find(ranges)
    assert ranges.residual is Residual.SUM


class TwoArguments(Decoder):
    def forward(self, hidden: Tensor, positions: Tensor) -> Any:  # type: ignore[override]
        return get_pp_group()


class ReadsWhatIsEarlier(Decoder):
    def forward(self, *args: Any, intermediate_tensors: Any = None) -> Any:  # type: ignore[override]
        return get_pp_group() and self.start_layer * self.saved  # type: ignore[operator]


class KeepsAnEarlierLayer(Decoder):
    """As Solar, whose layers in the middle add states from below: within one call alone."""

    mixed_at = 2

    def forward(
        self, input_ids: Any, positions: Tensor, intermediate_tensors: Any, inputs_embeds: Any
    ) -> Any:
        # Layer 0 is in no range that begins above it.
        kept: Any = None if self.start_layer else input_ids
        if self.start_layer <= self.mixed_at < self.end_layer:
            kept = kept + 0
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)


class ScalesWhatItTakes(Decoder):
    """Once a call, and so once a range."""

    def forward(
        self, input_ids: Any, positions: Tensor, intermediate_tensors: Any, inputs_embeds: Any
    ) -> Any:
        out = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        if isinstance(out, IntermediateTensors):
            for tensor in out.tensors.values():
                tensor.mul_(-3)
        return out


def test_ranges_that_do_not_make_up_the_decoder() -> None:
    def check(decoder: Decoder, edges: list[int], projected: Sequence[int] = ()) -> None:
        ranges = ranges_of(decoder)
        ranges.check_ranges(edges, projected, torch.device("cpu"))
        assert not any("forward" in layer.__dict__ for layer in ranges.attention)
        assert get_pp_group.__name__ == "get_pp_group"

    check(Decoder(), [0, 1, 2, LAYERS], [2])
    check(Decoder("hidden", ("hidden_states",)), [0, 1, LAYERS], [1, 2])
    # Where the layers that belong together are in one range, they may run.
    check(KeepsAnEarlierLayer(), [0, LAYERS])
    with pytest.raises(NoRanges, match=r"ranges that begin with layers 0, 1: TypeError") as error:
        check(KeepsAnEarlierLayer(), [0, 1, LAYERS])
    assert "\n" not in str(error.value)
    with pytest.raises(NoRanges, match="does not run from layer 2: TypeError"):
        check(KeepsAnEarlierLayer(), [0, LAYERS], [1, 2])
    with pytest.raises(NoRanges, match="makes other states of the ranges that begin"):
        check(ScalesWhatItTakes(), [0, 2, LAYERS])


def _wrong_layers() -> Decoder:
    decoder = Decoder()
    decoder.end_layer = 2
    return decoder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Decoder(keys=("hidden_states", "per_layer")), "per_layer from stage to stage"),
        (lambda: TwoArguments(), "does not run as a stage"),
        (_wrong_layers, "has 2 layers of 3"),
    ],
)
def test_decoders_without_ranges(make: Callable[[], Decoder], says: str) -> None:
    with pytest.raises(NoRanges, match=says) as error:
        ranges_of(make())
    assert "those that only retain or retrieve can" in str(error.value)


def test_streams_that_are_not_known() -> None:
    with pytest.raises(NoRanges, match="neither is it its hidden states"):
        find(ranges_of(Decoder("twice")))
    with pytest.raises(NoRanges, match="does not run from a layer within"):
        find(ranges_of(ReadsWhatIsEarlier()))


def test_models_without_a_decoder() -> None:
    with pytest.raises(NoRanges, match="has 0 decoders"):
        LayerRanges(nn.Linear(1, 1), [], HIDDEN, torch.float32)
